package sandbox

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// Reasons of the condition Scheduled that record who wrote the assignment.
const (
	// reasonFastPath: the allocator, after the container was created.
	reasonFastPath = "FastPath"
	// reasonAssigned: this controller, before it asks for the container.
	reasonAssigned = "Assigned"
)

// defaultRecoveryTimeout is the default of recoveryTimeoutSeconds.
const defaultRecoveryTimeout = 30 * time.Second

// exclusionFactor times Timing.Requeue is how long an agent that failed is not chosen again.
const exclusionFactor = 6

// observer determines the most important event of a sandbox.
type observer struct {
	loss    *lossDetector
	reports *reportObserver
	memory  *memory
	timing  Timing
}

// observe returns the most important event. A deletion comes first, then the clock, a reset, the loss of the agent and the
// agent's report.
func (o *observer) observe(ctx context.Context, t *target) (observation, error) {
	if t.deleting() {
		return observation{event: lifecycle.DeleteRequested}, nil
	}
	if acknowledged(t) {
		return observation{event: lifecycle.AgentRunning}, nil
	}
	lost, requeue, err := o.loss.detect(ctx, t)
	seen := observation{lost: lost, result: result{requeue: requeue}}
	if err != nil {
		return seen, err
	}
	event, requeue := o.expiry(t)
	seen.requeue = sooner(seen.requeue, requeue)
	switch {
	case event != 0:
		seen.event = event
	case t.resetRequested() && lost:
		seen.event = lifecycle.ResetWhileLost
	case t.resetRequested():
		seen.event = lifecycle.ResetRequested
	case t.assignment == nil:
		seen.event = unassigned(t)
	case t.sandbox.Status.Phase == v1alpha1.PhaseFailed && t.sandbox.Status.ExitCode == nil:
		seen.event = lifecycle.AgentFailed // it never ran, and the agent may have something left of it
	case lost:
		return seen.with(o.lost(t)), nil
	default:
		reported, err := o.reports.observe(ctx, t)
		return seen.with(reported), err
	}
	return seen, nil
}

// acknowledged reports whether the sandbox was acknowledged on the fast path and has no status yet. Its caller knows that it
// runs, so that it becomes Running before anything else is observed, even if its agent is lost by now.
func acknowledged(t *target) bool {
	if t.sandbox.Status.Phase != "" || t.assignment == nil || t.assignment.Started == nil {
		return false
	}
	started, st := t.sandbox.EffectiveStatus(), &t.sandbox.Status
	st.SandboxID, st.Endpoints = started.SandboxID, started.Endpoints
	st.StartTime, st.StartPath = started.StartTime, started.StartPath
	return true
}

// with returns the observation with the event and the results of a part of it.
func (o observation) with(part observation) observation {
	o.event, o.result = part.event, o.merge(part.result)
	return o
}

// expiry returns ExpireTimePassed after the expire time. Before that it requeues the sandbox shortly before, and at, the expire
// time.
func (o *observer) expiry(t *target) (lifecycle.Event, time.Duration) {
	expire := t.sandbox.Spec.ExpireTime
	if t.base.Status.Reason == reasonExpiring { // the removal has started: a later expire time does not stop it
		expire = &metav1.Time{Time: t.now}
	}
	if expire == nil {
		return 0, 0
	}
	left := expire.Sub(t.now)
	phase := t.sandbox.Status.Phase
	switch {
	case left <= 0 && t.assignment == nil && (phase == v1alpha1.PhaseExpired || phase == v1alpha1.PhaseFailed):
		return 0, 0
	case left <= 0:
		return lifecycle.ExpireTimePassed, 0
	case left <= o.timing.ExpirationThreshold:
		return 0, after(left)
	default:
		return 0, after(left - o.timing.ExpirationThreshold)
	}
}

// unassigned returns the event of a sandbox without an assignment.
func unassigned(t *target) lifecycle.Event {
	switch phase := t.sandbox.Status.Phase; {
	case phase == "":
		return lifecycle.Accepted
	case phase == v1alpha1.PhaseFailed, phase == v1alpha1.PhaseExpired, t.state().Finished:
		return 0
	default:
		return lifecycle.Unassigned
	}
}

// lost decides what to do about a lost agent. The transition time of the condition AgentLost is kept, so that a restart of
// this process does not restart the recovery timeout.
func (o *observer) lost(t *target) observation {
	if t.sandbox.Status.Phase != v1alpha1.PhaseRunning && !t.fast() {
		// It was never reported as running, so that the failure policy does not apply: it is placed on another agent.
		o.memory.exclude(t.name, t.assignment.AgentUID, exclusionFactor*o.timing.Requeue)
		return observation{event: lifecycle.AgentRefused, result: result{cause: &cause{"AgentUnavailable", "agent " + t.assignment.AgentPod + " is lost"}}}
	}
	seen := observation{event: lifecycle.AgentLost, result: result{requeue: after(o.timing.Requeue)}}
	c := meta.FindStatusCondition(t.sandbox.Status.Conditions, v1alpha1.ConditionAgentLost)
	if t.sandbox.Spec.FailurePolicy != v1alpha1.FailurePolicyAutoRecreate || c == nil || c.Status != metav1.ConditionTrue {
		return seen
	}
	timeout := defaultRecoveryTimeout
	if s := t.sandbox.Spec.RecoveryTimeoutSeconds; s != nil {
		timeout = time.Duration(*s) * time.Second
	}
	left := timeout - t.now.Sub(c.LastTransitionTime.Time)
	if left <= 0 {
		return observation{event: lifecycle.RecoveryTimeoutOver}
	}
	seen.requeue = sooner(seen.requeue, after(left))
	return seen
}
