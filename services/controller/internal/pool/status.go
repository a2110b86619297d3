package pool

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// writeStatus writes the status if it changed.
func (r *Reconciler) writeStatus(ctx context.Context, s *survey, problem error) error {
	next := s.pool.DeepCopy()
	st := &next.Status
	want, current := desired.Count(s.want, s.load), s.current()
	st.ObservedGeneration = next.Generation
	st.DesiredAgents, st.CurrentAgents, st.ReadyAgents = count(want), count(current), count(s.ready)
	st.TotalSlots = count(s.ready * s.want.PerAgent)
	st.ActiveSandboxes = count(s.load.Active)
	st.FreeSlots = max(st.TotalSlots-count(s.onReady), 0)
	st.Selector = labels.SelectorFromSet(selector(next)).String()
	set := func(kind string, status metav1.ConditionStatus, reason, message string) {
		meta.SetStatusCondition(&st.Conditions, metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message,
			ObservedGeneration: next.Generation, LastTransitionTime: metav1.Time{Time: r.Clock.Now()}})
	}
	switch {
	case s.ready > 0:
		set(v1alpha1.ConditionReady, metav1.ConditionTrue, "AgentsReady", "")
	case problem != nil:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error()))
	case want == 0:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, "NoAgentsWanted", "the pool keeps no agents")
	default:
		set(v1alpha1.ConditionReady, metav1.ConditionFalse, "AgentsNotReady", "no agent is ready yet")
	}
	switch {
	case problem != nil:
		set(v1alpha1.ConditionProgressing, metav1.ConditionFalse, reasonOf(problem), truncate(problem.Error()))
	case current < want || s.ready < min(current, want):
		set(v1alpha1.ConditionProgressing, metav1.ConditionTrue, "AgentsComing", fmt.Sprintf("%d of %d agents are ready", s.ready, want))
	default:
		set(v1alpha1.ConditionProgressing, metav1.ConditionFalse, "Settled", "")
	}
	if equality.Semantic.DeepEqual(s.pool.Status, *st) {
		return nil
	}
	if err := r.Client.Status().Patch(ctx, next, client.MergeFromWithOptions(s.pool, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("writing pool status: %w", err)
	}
	before := meta.FindStatusCondition(s.pool.Status.Conditions, v1alpha1.ConditionProgressing)
	var bad *templateError
	if errors.As(problem, &bad) && (before == nil || before.Reason != bad.reason || before.Message != bad.Error()) {
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeWarning, bad.reason, "Reconcile", "%s", truncate(bad.Error()))
	}
	return nil
}

func reasonOf(err error) string {
	var bad *templateError
	if errors.As(err, &bad) {
		return bad.reason
	}
	return "ReconcileFailed"
}

func count(n int) int32 { return int32(min(n, 1<<30)) }
