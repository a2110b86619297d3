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
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// statusWriter writes the status of pools, and Events for what changes in it.
type statusWriter struct {
	config Config
	pace   *pace
	// pinErr returns why an agent could not be asked to pin its images.
	pinErr func(types.UID) error
}

// write writes the status if it has changed, and then Events. If only counts have changed and were written just now, it
// returns the time after which to write them.
func (w *statusWriter) write(ctx context.Context, i *inventory, problem error) (time.Duration, error) {
	next := i.pool.DeepCopy()
	s := i.summarize()
	w.fill(i, next, s, problem)
	if equality.Semantic.DeepEqual(i.pool.Status, next.Status) {
		return 0, nil
	}
	key := client.ObjectKeyFromObject(next)
	if later := w.pace.left(key); later > 0 && sameButCounts(i.pool.Status, next.Status) {
		return later, nil
	}
	if err := w.config.Client.Status().Patch(ctx, next, client.MergeFromWithOptions(i.pool, client.MergeFromWithOptimisticLock{})); err != nil {
		return 0, fmt.Errorf("writing pool status: %w", err)
	}
	w.pace.wrote(key)
	w.announce(i.pool, next, s, problem)
	return 0, nil
}

func (w *statusWriter) fill(i *inventory, next *v1alpha1.SandboxPool, s summary, problem error) {
	st := &next.Status
	want := desired.Count(i.want, i.load)
	st.ObservedGeneration = next.Generation
	st.DesiredAgents, st.CurrentAgents, st.ReadyAgents, st.DrainingAgents = count(want), count(i.current()), count(s.ready), count(s.draining)
	st.Capacity = count(s.ready * i.want.PerAgent)
	st.ActiveSandboxes = count(i.load.Active + s.liveOnDraining)
	st.FreeCapacity = max(st.Capacity-count(s.usedOnReady), 0)
	st.Selector = labels.SelectorFromSet(selector(next)).String()
	w.setCondition(next, v1alpha1.ConditionReady, readiness(next, s, want, problem))
	w.setCondition(next, v1alpha1.ConditionProgressing, progressOf(i, next, s, want, problem))
	if w.config.Index.Synced() { // until the Registry is read, the status of slots and images stays
		w.fillSlots(next, s)
		w.fillUsers(next, s)
		w.fillRuntimes(next, s)
		w.fillImages(i, next)
	}
}

// announce writes Events for changes of the conditions.
func (w *statusWriter) announce(old, next *v1alpha1.SandboxPool, s summary, problem error) {
	before := meta.FindStatusCondition(old.Status.Conditions, v1alpha1.ConditionProgressing)
	var invalid *templateError
	if errors.As(problem, &invalid) && (before == nil || before.Reason != invalid.reason || before.Message != invalid.Error()) {
		w.config.Recorder.Eventf(old, nil, corev1.EventTypeWarning, invalid.reason, "Reconcile", "%s", truncate(invalid.Error()))
	}
	if next.DeletionTimestamp != nil && (before == nil || before.Reason != reasonDeleting) {
		w.config.Recorder.Eventf(old, nil, corev1.EventTypeNormal, reasonDeleting, "Reconcile", "the pool is being deleted: %s", s.waiting())
	}
	was, is := meta.FindStatusCondition(old.Status.Conditions, v1alpha1.ConditionImagesReady), meta.FindStatusCondition(next.Status.Conditions, v1alpha1.ConditionImagesReady)
	if is != nil && is.Reason == reasonImagePullFailed && (was == nil || was.Reason != is.Reason || was.Message != is.Message) {
		w.config.Recorder.Eventf(old, nil, corev1.EventTypeWarning, reasonImagePullFailed, "PinImages", "%s", is.Message)
	}
}

// sameButCounts reports whether two statuses differ only in what changes with each sandbox.
func sameButCounts(a, b v1alpha1.SandboxPoolStatus) bool {
	a.ActiveSandboxes, a.FreeCapacity, a.ReadySlots = b.ActiveSandboxes, b.FreeCapacity, b.ReadySlots
	return equality.Semantic.DeepEqual(a, b)
}

// state is the state of a condition.
type state struct {
	status          metav1.ConditionStatus
	reason, message string
}

func (w *statusWriter) setCondition(p *v1alpha1.SandboxPool, kind string, s state) {
	meta.SetStatusCondition(&p.Status.Conditions, metav1.Condition{Type: kind, Status: s.status, Reason: s.reason, Message: s.message,
		ObservedGeneration: p.Generation, LastTransitionTime: metav1.Time{Time: w.config.Clock.Now()}})
}

// readiness returns the condition Ready.
func readiness(p *v1alpha1.SandboxPool, s summary, want int, problem error) state {
	switch {
	case p.DeletionTimestamp != nil:
		return state{metav1.ConditionFalse, reasonDeleting, "the pool is being deleted and accepts no new sandboxes"}
	case s.ready > 0:
		return state{metav1.ConditionTrue, "AgentsReady", ""}
	case problem != nil:
		return state{metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error())}
	case want == 0:
		return state{metav1.ConditionFalse, "NoAgentsWanted", "the pool needs no agents"}
	}
	if r := desired.SummarizeRuntimes(s.runtimes); r.Known && !r.Ready {
		return state{metav1.ConditionFalse, r.Reason, truncate("no agent is ready: " + r.Message)}
	}
	return state{metav1.ConditionFalse, reasonAgentsNotReady, "no agent is ready yet"}
}

// progressOf returns the condition Progressing.
func progressOf(i *inventory, p *v1alpha1.SandboxPool, s summary, want int, problem error) state {
	serving := i.current() - s.draining
	var unbound *unboundError
	switch {
	case errors.As(problem, &unbound):
		return state{metav1.ConditionFalse, reasonUnbound, truncate(problem.Error())}
	case p.DeletionTimestamp != nil:
		return state{metav1.ConditionTrue, reasonDeleting, s.waiting()}
	case problem != nil:
		return state{metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error())}
	case s.outdated > 0:
		return state{metav1.ConditionTrue, "RollingOut",
			fmt.Sprintf("%d of %s ready and up to date with the template; %s", s.fresh, counted(serving, "agent is", "agents are"), s.waiting())}
	case serving < want || s.ready < min(serving, want):
		return state{metav1.ConditionTrue, "AgentsComing", fmt.Sprintf("%d of %d agents are ready", s.ready, want)}
	case s.draining > 0:
		return state{metav1.ConditionTrue, "Draining", s.waiting()}
	default:
		return state{metav1.ConditionFalse, "Settled", ""}
	}
}

func (w *statusWriter) fillSlots(p *v1alpha1.SandboxPool, s summary) {
	slots := desired.CountSlots(s.slots)
	p.Status.ReadySlots = count(slots.Free)
	if p.Spec.Slots.Off() {
		meta.RemoveStatusCondition(&p.Status.Conditions, v1alpha1.ConditionSlotsReady)
		return
	}
	c := state{metav1.ConditionFalse, slots.Reason, truncate(slots.Message)}
	switch {
	case p.DeletionTimestamp != nil:
		c.reason, c.message = reasonDeleting, "the pool is being deleted and keeps no slots"
	case slots.Ready:
		c.status = metav1.ConditionTrue
	}
	w.setCondition(p, v1alpha1.ConditionSlotsReady, c)
}

func (w *statusWriter) fillUsers(p *v1alpha1.SandboxPool, s summary) {
	if u := p.Spec.UserNamespace; u == "" || u == v1alpha1.UserNamespaceDisabled {
		meta.RemoveStatusCondition(&p.Status.Conditions, v1alpha1.ConditionUserNamespaces)
		return
	}
	users := desired.SummarizeUsers(s.users)
	c := state{metav1.ConditionFalse, users.Reason, truncate(users.Message)}
	if users.On {
		c.status = metav1.ConditionTrue
	}
	w.setCondition(p, v1alpha1.ConditionUserNamespaces, c)
}

func (w *statusWriter) fillRuntimes(p *v1alpha1.SandboxPool, s summary) {
	runtimes := desired.SummarizeRuntimes(s.runtimes)
	c := state{metav1.ConditionFalse, runtimes.Reason, truncate(runtimes.Message)}
	switch {
	case runtimes.Ready:
		c.status = metav1.ConditionTrue
	case !runtimes.Known:
		c.status = metav1.ConditionUnknown
	}
	w.setCondition(p, v1alpha1.ConditionRuntimeReady, c)
}

func (w *statusWriter) fillImages(i *inventory, p *v1alpha1.SandboxPool) {
	p.Status.Images = imageStatus(p.Spec.Images, i.sorted(), w.pinErr)
	if len(p.Spec.Images) == 0 {
		meta.RemoveStatusCondition(&p.Status.Conditions, v1alpha1.ConditionImagesReady)
		return
	}
	c := state{status: metav1.ConditionFalse}
	ready, reason, message := imagesReady(p.Status.Images)
	c.reason, c.message = reason, message
	switch {
	case p.DeletionTimestamp != nil:
		c.reason, c.message = reasonDeleting, "the pool is being deleted"
	case ready:
		c.status = metav1.ConditionTrue
	}
	w.setCondition(p, v1alpha1.ConditionImagesReady, c)
}

// reasonDeleting is the reason of the conditions of a pool that is being deleted.
const reasonDeleting = "Deleting"

// summary has the numbers of a pool. An agent either serves or drains.
type summary struct {
	// ready agents serve; fresh is the number of those that are up to date with the template. outdated agents serve and are not
	// up to date, ready or not.
	ready, fresh, outdated int
	// usedOnReady is the capacity of ready agents that is in use.
	usedOnReady int
	// draining agents have heldOnDraining sandboxes, of which finishedOnDraining have ended and liveOnDraining use capacity.
	draining, heldOnDraining, finishedOnDraining, liveOnDraining int
	// slots are those of ready agents that the Registry has as ready, too.
	slots []desired.SlotAgent
	// users are those of the agents that the Registry has.
	users []desired.UsersAgent
	// runtimes are those of the agents that have said whether they can run new sandboxes.
	runtimes []desired.RuntimeAgent
}

func (i *inventory) summarize() summary {
	var s summary
	for _, m := range i.members {
		switch {
		case m.drain != "":
			s.draining++
			s.heldOnDraining += max(m.usage.Held, m.usage.Used())
			s.finishedOnDraining += m.usage.Finished
			s.liveOnDraining += m.usage.Used()
			continue
		case m.outdated:
			s.outdated++
		case m.ready():
			s.fresh++
		}
		if problem := m.runtimeProblem(); m.known && (problem != "" || m.agent.GetReady()) {
			s.runtimes = append(s.runtimes, desired.RuntimeAgent{Problem: problem})
		}
		if m.known {
			info := m.agent.GetInfo()
			s.users = append(s.users, desired.UsersAgent{On: info.GetUserNamespaces(), OffReason: info.GetUserNamespacesOffReason()})
		}
		if !m.ready() {
			continue
		}
		s.ready++
		s.usedOnReady += m.usage.Used()
		if m.known && m.agent.GetReady() {
			s.slots = append(s.slots, desired.SlotAgent{
				Free: int(m.agent.GetFreeSlots()), Wanted: int(m.agent.GetWantedSlots()), OffReason: m.agent.GetSlotsOffReason(), Idle: m.usage.Used() == 0,
			})
		}
	}
	return s
}

// waiting explains what draining agents wait for.
func (s summary) waiting() string {
	if s.draining == 0 {
		return "no agent is draining"
	}
	text := counted(s.draining, "agent is draining", "agents are draining")
	if s.heldOnDraining == 0 {
		return text
	}
	text += ", waiting for " + counted(s.heldOnDraining, "sandbox", "sandboxes")
	if s.finishedOnDraining > 0 {
		text += fmt.Sprintf(", of which %d ended and will be deleted after ttlAfterFinished", s.finishedOnDraining)
	}
	return text
}

func reasonOf(err error) string {
	var invalid *templateError
	var unbound *unboundError
	switch {
	case errors.As(err, &invalid):
		return invalid.reason
	case errors.As(err, &unbound):
		return reasonUnbound
	}
	return "ReconcileFailed"
}

func count(n int) int32 { return int32(min(n, 1<<30)) }
