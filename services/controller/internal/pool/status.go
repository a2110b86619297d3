package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// writeStatus writes the status if it changed. Of what changes with each sandbox it is told later when to look again, if it
// was written just now.
func (r *Reconciler) writeStatus(ctx context.Context, s *survey, problem error) (later time.Duration, err error) {
	next := s.pool.DeepCopy()
	st := &next.Status
	t := s.tally()
	want := desired.Count(s.want, s.load)
	st.ObservedGeneration = next.Generation
	st.DesiredAgents, st.CurrentAgents, st.ReadyAgents, st.DrainingAgents = count(want), count(s.current()), count(t.ready), count(t.draining)
	st.Capacity = count(t.ready * s.want.PerAgent)
	st.ActiveSandboxes = count(s.load.Active + t.left)
	st.FreeCapacity = max(st.Capacity-count(t.onReady), 0)
	st.Selector = labels.SelectorFromSet(selector(next)).String()
	r.conclude(s, next, t, want, problem)
	r.concludeSlots(next, t)
	if equality.Semantic.DeepEqual(s.pool.Status, *st) {
		return 0, nil
	}
	key := client.ObjectKeyFromObject(next)
	if later := r.pace.left(key); later > 0 && sameButCounts(s.pool.Status, *st) {
		return later, nil
	}
	if err := r.Client.Status().Patch(ctx, next, client.MergeFromWithOptions(s.pool, client.MergeFromWithOptimisticLock{})); err != nil {
		return 0, fmt.Errorf("writing pool status: %w", err)
	}
	r.pace.wrote(key)
	before := meta.FindStatusCondition(s.pool.Status.Conditions, v1alpha1.ConditionProgressing)
	var bad *templateError
	if errors.As(problem, &bad) && (before == nil || before.Reason != bad.reason || before.Message != bad.Error()) {
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeWarning, bad.reason, "Reconcile", "%s", truncate(bad.Error()))
	}
	if next.DeletionTimestamp != nil && (before == nil || before.Reason != reasonDeleting) {
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, reasonDeleting, "Reconcile", "the pool is being deleted: %s", t.waiting())
	}
	return 0, nil
}

// sameButCounts tells whether two statuses differ in nothing but what changes with each sandbox.
func sameButCounts(a, b v1alpha1.SandboxPoolStatus) bool {
	a.ActiveSandboxes, a.FreeCapacity, a.ReadySlots = b.ActiveSandboxes, b.FreeCapacity, b.ReadySlots
	return equality.Semantic.DeepEqual(a, b)
}

// conclude sets the conditions.
func (r *Reconciler) conclude(s *survey, next *v1alpha1.SandboxPool, t tally, want int, problem error) {
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&next.Status.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message,
			ObservedGeneration: next.Generation, LastTransitionTime: metav1.Time{Time: r.Clock.Now()}})
	}
	switch {
	case next.DeletionTimestamp != nil:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonDeleting, "the pool is being deleted and takes no new sandboxes")
	case t.ready > 0:
		set(v1alpha1.ConditionReady, metav1.ConditionTrue, "AgentsReady", "")
	case problem != nil:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error()))
	case want == 0:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, "NoAgentsWanted", "the pool keeps no agents")
	default:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, "AgentsNotReady", "no agent is ready yet")
	}
	serving := s.current() - t.draining
	switch {
	case next.DeletionTimestamp != nil:
		set(v1alpha1.ConditionProgressing, metav1.ConditionTrue, reasonDeleting, t.waiting())
	case problem != nil:
		set(v1alpha1.ConditionProgressing, metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error()))
	case t.outdated > 0:
		set(v1alpha1.ConditionProgressing, metav1.ConditionTrue, "RollingOut",
			fmt.Sprintf("%d of %s of the present template and ready; %s", t.fresh, counted(serving, "agent is", "agents are"), t.waiting()))
	case serving < want || t.ready < min(serving, want):
		set(v1alpha1.ConditionProgressing, metav1.ConditionTrue, "AgentsComing", fmt.Sprintf("%d of %d agents are ready", t.ready, want))
	case t.draining > 0:
		set(v1alpha1.ConditionProgressing, metav1.ConditionTrue, "Draining", t.waiting())
	default:
		set(v1alpha1.ConditionProgressing, metav1.ConditionFalse, "Settled", "")
	}
}

// concludeSlots tells of slots. Until the Registry is read, what was told of them stands.
func (r *Reconciler) concludeSlots(next *v1alpha1.SandboxPool, t tally) {
	if !r.Index.Synced() {
		return
	}
	slots := desired.CountSlots(t.slots)
	next.Status.ReadySlots = count(slots.Free)
	if next.Spec.Slots.Off() {
		meta.RemoveStatusCondition(&next.Status.Conditions, v1alpha1.ConditionSlotsReady)
		return
	}
	c := metav1.Condition{Type: v1alpha1.ConditionSlotsReady, Status: metav1.ConditionFalse, Reason: slots.Reason, Message: truncate(slots.Message),
		ObservedGeneration: next.Generation, LastTransitionTime: metav1.Time{Time: r.Clock.Now()}}
	switch {
	case next.DeletionTimestamp != nil:
		c.Reason, c.Message = reasonDeleting, "the pool is being deleted and keeps no slots"
	case slots.Ready:
		c.Status = metav1.ConditionTrue
	}
	meta.SetStatusCondition(&next.Status.Conditions, c)
}

// reasonDeleting is the reason of a pool's conditions while it drains for good.
const reasonDeleting = "Deleting"

// tally is a pool in numbers. Agents are counted apart as they serve or drain.
type tally struct {
	// ready agents serve, fresh of them by the present template; outdated ones serve by another, ready or not.
	ready, fresh, outdated int
	// onReady is the number of places taken on ready agents.
	onReady int
	// draining agents have left sandboxes, of which the processes of ended have ended.
	draining, left, ended int
	// slots are those of ready agents that the Registry knows to be well.
	slots []desired.SlotAgent
}

func (s *survey) tally() tally {
	var t tally
	for _, m := range s.members {
		switch {
		case m.drain != "":
			t.draining++
			t.left += m.used
			t.ended += min(m.ended, m.used)
			continue
		case m.outdated:
			t.outdated++
		case isReady(m.pod):
			t.fresh++
		}
		if isReady(m.pod) {
			t.ready++
			t.onReady += m.used
			if m.known && m.agent.GetReady() {
				t.slots = append(t.slots, desired.SlotAgent{
					Free: int(m.agent.GetFreeSlots()), Wanted: int(m.agent.GetWantedSlots()), OffReason: m.agent.GetSlotsOffReason(), Idle: m.used == 0,
				})
			}
		}
	}
	return t
}

// waiting says what draining agents wait for.
func (t tally) waiting() string {
	if t.draining == 0 {
		return "none drains"
	}
	s := counted(t.draining, "agent drains", "agents drain")
	if t.left == 0 {
		return s
	}
	s += " and " + map[bool]string{true: "waits", false: "wait"}[t.draining == 1] + " for " + counted(t.left, "sandbox", "sandboxes")
	if t.ended > 0 {
		s += fmt.Sprintf(", of which %d ended and only have to be deleted", t.ended)
	}
	return s
}

func reasonOf(err error) string {
	var bad *templateError
	if errors.As(err, &bad) {
		return bad.reason
	}
	return "ReconcileFailed"
}

func count(n int) int32 { return int32(min(n, 1<<30)) }
