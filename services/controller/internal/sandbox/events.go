package sandbox

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/events"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// eventWriter writes Events about Sandboxes.
type eventWriter struct{ recorder events.EventRecorder }

func (e eventWriter) normal(s *v1alpha1.Sandbox, reason, action, note string) {
	e.write(s, corev1.EventTypeNormal, reason, action, note)
}

func (e eventWriter) warn(s *v1alpha1.Sandbox, reason, action, note string) {
	e.write(s, corev1.EventTypeWarning, reason, action, note)
}

func (e eventWriter) write(s *v1alpha1.Sandbox, kind, reason, action, note string) {
	e.recorder.Eventf(s, nil, kind, conditionReason(reason), action, "%s", truncate(note, 1000))
}

// announcer writes Events for changes of a status, after the status was written.
type announcer struct {
	events  eventWriter
	memory  *memory
	metrics metrics
}

// announce writes an Event for each change that is of interest to users.
func (a *announcer) announce(t *target, r result) {
	old, st := &t.base.Status, &t.sandbox.Status
	a.announcePhase(t, old.Phase)
	warned := r.warned
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionScheduled) && r.unplaced != nil {
		a.events.warn(t.sandbox, r.unplaced.reason, "Schedule", "not placed: "+r.unplaced.message)
		warned = true
	}
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionAgentLost) {
		if c := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionAgentLost); c.Status == metav1.ConditionTrue {
			a.events.warn(t.sandbox, "AgentLost", "Observe", c.Message)
			warned = true
		} else {
			a.events.normal(t.sandbox, "AgentReturned", "Observe", "the agent answers again, or the sandbox is no longer assigned to it")
		}
	}
	if !warned {
		a.announceStuck(t, r)
	}
	if old.Phase == v1alpha1.PhaseExpired && st.Phase == v1alpha1.PhaseExpired && old.ObservedGeneration != st.ObservedGeneration {
		a.events.warn(t.sandbox, "StaysExpired", "Update", "an expired sandbox has no container, and neither a reset nor a later expire time starts one: create it again")
	}
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionFinished) && st.Phase == v1alpha1.PhaseRunning && st.ExitCode != nil {
		a.events.normal(t.sandbox, "Completed", "Observe", "the process ended with code 0")
	}
}

func (a *announcer) announcePhase(t *target, old v1alpha1.Phase) {
	phase := t.sandbox.Status.Phase
	if old == phase || phase == "" {
		return
	}
	a.metrics.phases.WithLabelValues(string(phase)).Inc()
	kind := corev1.EventTypeNormal
	if phase == v1alpha1.PhaseFailed {
		kind = corev1.EventTypeWarning
	}
	a.events.write(t.sandbox, kind, string(phase), "Reconcile", phaseNote(&t.sandbox.Status))
	if phase == v1alpha1.PhaseTerminating {
		if _, err := t.sandbox.DeleteGracePeriod(); err != nil {
			a.events.warn(t.sandbox, "InvalidGracePeriod", "Delete", fmt.Sprintf("the grace period of the delete call is ignored: %s", err))
		}
	}
}

// announceStuck writes an Event for a new reason why the sandbox makes no progress.
func (a *announcer) announceStuck(t *target, r result) {
	if !changed(t.base.Status.Conditions, t.sandbox.Status.Conditions, v1alpha1.ConditionReady) {
		return
	}
	c := meta.FindStatusCondition(t.sandbox.Status.Conditions, v1alpha1.ConditionReady)
	last := a.memory.lastError(t.name)
	if r.blocked != nil || stuck(c.Reason) || last != nil && c.Reason == last.reason {
		a.events.warn(t.sandbox, c.Reason, "Reconcile", c.Message)
	}
}

// stuck reports whether a reason of the condition Ready is worth an Event.
func stuck(reason string) bool {
	return reason == reasonPullingImage || reason == reasonNotAnswering || reason == reasonUnreachable || reason == reasonRemoveFailed
}

// changed reports whether a condition has another status or reason than before.
func changed(old, now []metav1.Condition, kind string) bool {
	a, b := meta.FindStatusCondition(old, kind), meta.FindStatusCondition(now, kind)
	return b != nil && (a == nil || a.Status != b.Status || a.Reason != b.Reason)
}
