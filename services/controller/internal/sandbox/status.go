package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// recordEnd sets the finish time and the condition Finished.
func recordEnd(t *target, why *cause) {
	if t.sandbox.Status.FinishTime == nil {
		t.sandbox.Status.FinishTime = &metav1.MicroTime{Time: t.now}
	}
	setCondition(t, v1alpha1.ConditionFinished, metav1.ConditionTrue, *why)
}

// conclude derives reason, message and conditions from the results of the steps. lost: the agent is lost.
func conclude(t *target, r result, lost bool) {
	st := &t.sandbox.Status
	if !t.deleting() || st.Phase == v1alpha1.PhaseTerminating {
		st.ObservedGeneration = t.sandbox.Generation
	}
	var why cause
	if r.cause != nil {
		why = *r.cause
	}
	if r.blocked != nil {
		why.message = r.blocked.message
	}
	finished := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionFinished)
	switch {
	case st.Phase == v1alpha1.PhaseExpired:
		st.Reason, st.Message = "Expired", "the expire time has passed"
	case st.Phase == v1alpha1.PhaseFailed && t.base.Status.Phase == v1alpha1.PhaseFailed: // the first cause stays
	case why.reason != "" || st.Phase != t.base.Status.Phase:
		st.Reason, st.Message = why.reason, why.message
	}
	if finished != nil && st.Phase == v1alpha1.PhaseRunning {
		st.Reason, st.Message = finished.Reason, finished.Message
	}
	lost = lost && t.assignment != nil
	setCondition(t, v1alpha1.ConditionScheduled, scheduledStatus(t), scheduledCause(t, r))
	if lost {
		setCondition(t, v1alpha1.ConditionAgentLost, metav1.ConditionTrue, cause{"AgentUnavailable",
			"agent " + t.assignment.AgentPod + " does not exist or cannot be reached; failure policy " + cmp.Or(string(t.sandbox.Spec.FailurePolicy), "Manual")})
	} else if t.wasLost() {
		setCondition(t, v1alpha1.ConditionAgentLost, metav1.ConditionFalse, cause{reason: "AgentReachable"})
	}
	status, readyCause := readiness(t, r, why, lost, finished != nil)
	setCondition(t, v1alpha1.ConditionReady, status, readyCause)
}

func scheduledStatus(t *target) metav1.ConditionStatus {
	if t.assignment != nil {
		return metav1.ConditionTrue
	}
	return metav1.ConditionFalse
}

func scheduledCause(t *target, r result) cause {
	switch {
	case t.assignment != nil && t.fast():
		return cause{reasonFastPath, "placed on " + t.assignment.AgentPod + " before the resource was written"}
	case t.assignment != nil:
		return cause{reasonAssigned, "assigned to " + t.assignment.AgentPod}
	case r.unplaced != nil:
		return *r.unplaced
	default:
		return cause{cmp.Or(string(t.sandbox.Status.Phase), "Pending"), "not assigned to an agent"}
	}
}

func readiness(t *target, r result, why cause, lost, finished bool) (metav1.ConditionStatus, cause) {
	st := &t.sandbox.Status
	switch {
	case r.blocked != nil:
		return metav1.ConditionFalse, *r.blocked
	case t.deleting():
		return metav1.ConditionFalse, cause{reasonTerminating, why.message}
	case r.removing && t.assignment != nil:
		return metav1.ConditionFalse, why
	case lost && st.Phase != v1alpha1.PhaseFailed:
		return metav1.ConditionFalse, cause{v1alpha1.ConditionAgentLost, "it is unknown whether the process runs"}
	case st.Phase == v1alpha1.PhaseRunning && !finished:
		return metav1.ConditionTrue, cause{reason: "Running"}
	default:
		return metav1.ConditionFalse, cause{cmp.Or(st.Reason, string(st.Phase), "Pending"), st.Message}
	}
}

func setCondition(t *target, kind string, status metav1.ConditionStatus, why cause) {
	meta.SetStatusCondition(&t.sandbox.Status.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: conditionReason(why.reason), Message: why.message, ObservedGeneration: t.sandbox.Generation,
		LastTransitionTime: metav1.Time{Time: t.now},
	})
}

// conditionReason returns a reason that the API server accepts for a condition.
func conditionReason(s string) string {
	s = strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' {
			return c
		}
		return -1
	}, s)
	if s == "" || s[0] < 'A' {
		s = "Unknown" + s
	}
	return truncate(s, 128)
}

// phaseNote returns the text of the Event for a new phase.
func phaseNote(st *v1alpha1.SandboxStatus) string {
	switch st.Phase { //nolint:exhaustive // the others have only their message
	case v1alpha1.PhaseBound:
		return fmt.Sprintf("attempt %d is assigned to agent %s", st.Attempt, st.AssignedPod)
	case v1alpha1.PhaseRunning:
		return fmt.Sprintf("container %s runs on node %s", st.SandboxID, st.NodeName)
	}
	return strings.TrimSuffix(strings.TrimSpace(st.Reason+": "+st.Message), ":")
}

// messageOf returns an error as the status shows it: a fault without its cause.
func messageOf(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return truncate(f.Message(), 1024)
	}
	return truncate(err.Error(), 1024)
}

func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
