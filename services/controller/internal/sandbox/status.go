package sandbox

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/types/known/timestamppb"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// unknownExitCode stands for a process of which nobody knows how it ended, as containerd has it.
const unknownExitCode = 255

// record takes over what the agent reports of the container.
func (p *pass) record(r *agentv1.SandboxReport) {
	st := &p.sandbox.Status
	st.SandboxID, st.Endpoints = r.GetContainerId(), slices.Clone(r.GetEndpoints())
	st.StartTime, st.StartPath = micro(r.GetStartTime()), convert.StartPathFromProto(r.GetStartPath())
	st.FinishTime = micro(r.GetFinishTime())
	st.ExitCode = nil
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
		st.ExitCode = ptr.To(int32(unknownExitCode))
		if r.ExitCode != nil {
			st.ExitCode = ptr.To(r.GetExitCode())
		}
		p.explain(cmp.Or(r.GetReason(), exitReason(*st.ExitCode)), cmp.Or(r.GetMessage(), fmt.Sprintf("the process ended with code %d", *st.ExitCode)))
	}
}

func exitReason(code int32) string {
	if code == 0 {
		return "Completed"
	}
	return "Error"
}

// recordEnd sets the condition that tells that the process has ended.
func (p *pass) recordEnd() {
	if p.sandbox.Status.FinishTime == nil {
		p.sandbox.Status.FinishTime = &metav1.MicroTime{Time: p.now}
	}
	p.set(v1alpha1.ConditionFinished, metav1.ConditionTrue, p.reason, p.message)
}

// forgetEnd makes room for the next container's story.
func (p *pass) forgetEnd() {
	st := &p.sandbox.Status
	st.ExitCode, st.StartTime, st.StartPath, st.FinishTime, st.Reason, st.Message = nil, nil, "", nil, "", ""
	meta.RemoveStatusCondition(&st.Conditions, v1alpha1.ConditionFinished)
}

// conclude derives reason, message and conditions from what the pass found.
func (p *pass) conclude() {
	st := &p.sandbox.Status
	if p.sandbox.DeletionTimestamp == nil || st.Phase == v1alpha1.PhaseTerminating {
		st.ObservedGeneration = p.sandbox.Generation
	}
	finished := meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionFinished)
	switch {
	case st.Phase == v1alpha1.PhaseExpired:
		st.Reason, st.Message = "Expired", "the expire time has passed"
	case st.Phase == v1alpha1.PhaseFailed && p.base.Status.Phase == v1alpha1.PhaseFailed: // it failed for one reason only
	case p.reason != "" || st.Phase != p.base.Status.Phase:
		st.Reason, st.Message = p.reason, p.message
	}
	if finished != nil && st.Phase == v1alpha1.PhaseRunning {
		st.Reason, st.Message = finished.Reason, finished.Message
	}
	p.concludeScheduled()
	p.concludeLost()
	p.concludeReady(finished != nil)
}

func (p *pass) concludeScheduled() {
	st := &p.sandbox.Status
	switch {
	case p.assignment != nil && p.fast():
		p.set(v1alpha1.ConditionScheduled, metav1.ConditionTrue, reasonFastPath, "placed on "+p.assignment.AgentPod+" before the resource was written")
	case p.assignment != nil:
		p.set(v1alpha1.ConditionScheduled, metav1.ConditionTrue, reasonAssigned, "assigned to "+p.assignment.AgentPod)
	case p.unplaced != "":
		p.set(v1alpha1.ConditionScheduled, metav1.ConditionFalse, p.unplaced, p.message)
	default:
		p.set(v1alpha1.ConditionScheduled, metav1.ConditionFalse, cmp.Or(string(st.Phase), "Pending"), "assigned to no agent")
	}
}

func (p *pass) concludeLost() {
	switch {
	case p.lost && p.assignment != nil:
		p.set(v1alpha1.ConditionAgentLost, metav1.ConditionTrue, "AgentUnavailable",
			"agent "+p.assignment.AgentPod+" is gone or cannot be reached; failure policy "+cmp.Or(string(p.sandbox.Spec.FailurePolicy), "Manual"))
	case p.wasLost():
		p.set(v1alpha1.ConditionAgentLost, metav1.ConditionFalse, "AgentReachable", "")
	}
}

func (p *pass) concludeReady(finished bool) {
	st := &p.sandbox.Status
	switch {
	case p.hindrance != "":
		p.set(v1alpha1.ConditionReady, metav1.ConditionFalse, p.hindrance, p.message)
	case p.sandbox.DeletionTimestamp != nil:
		p.set(v1alpha1.ConditionReady, metav1.ConditionFalse, reasonTerminating, p.message)
	case p.leaving && p.assignment != nil:
		p.set(v1alpha1.ConditionReady, metav1.ConditionFalse, p.reason, p.message)
	case p.lost && p.assignment != nil && st.Phase != v1alpha1.PhaseFailed:
		p.set(v1alpha1.ConditionReady, metav1.ConditionFalse, v1alpha1.ConditionAgentLost, "nobody knows whether the process runs")
	case st.Phase == v1alpha1.PhaseRunning && !finished:
		p.set(v1alpha1.ConditionReady, metav1.ConditionTrue, "Running", "")
	default:
		p.set(v1alpha1.ConditionReady, metav1.ConditionFalse, cmp.Or(st.Reason, cmp.Or(string(st.Phase), "Pending")), st.Message)
	}
}

func (p *pass) set(kind string, status metav1.ConditionStatus, reason, message string) {
	meta.SetStatusCondition(&p.sandbox.Status.Conditions, metav1.Condition{
		Type: kind, Status: status, Reason: conditionReason(reason), Message: message, ObservedGeneration: p.sandbox.Generation,
		LastTransitionTime: metav1.Time{Time: p.now},
	})
}

// announce writes an Event for each change that a person may look for, once it is durable.
func (p *pass) announce() {
	old, st := &p.base.Status, &p.sandbox.Status
	if old.Phase != st.Phase && st.Phase != "" {
		p.metrics.phases.WithLabelValues(string(st.Phase)).Inc()
		kind := corev1.EventTypeNormal
		if st.Phase == v1alpha1.PhaseFailed {
			kind = corev1.EventTypeWarning
		}
		p.event(kind, string(st.Phase), "Reconcile", p.phaseNote())
	}
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionScheduled) && p.unplaced != "" {
		p.warn(p.unplaced, "Schedule", "not placed: "+p.message)
	}
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionAgentLost) {
		if p.lost {
			p.warn("AgentLost", "Observe", meta.FindStatusCondition(st.Conditions, v1alpha1.ConditionAgentLost).Message)
		} else {
			p.event(corev1.EventTypeNormal, "AgentReturned", "Observe", "the agent answers again, or the sandbox has left it")
		}
	}
	p.announceStuck()
	if old.Phase == v1alpha1.PhaseExpired && st.Phase == v1alpha1.PhaseExpired && old.ObservedGeneration != st.ObservedGeneration {
		p.warn("StaysExpired", "Update", "an expired sandbox has no container and gets none, by a reset or a later expire time neither: create it anew")
	}
	if changed(old.Conditions, st.Conditions, v1alpha1.ConditionFinished) && st.Phase == v1alpha1.PhaseRunning && st.ExitCode != nil {
		p.event(corev1.EventTypeNormal, "Completed", "Observe", "the process ended with code 0")
	}
}

// announceStuck tells of a reason for which the sandbox gets no further, when it is new.
func (p *pass) announceStuck() {
	c := meta.FindStatusCondition(p.sandbox.Status.Conditions, v1alpha1.ConditionReady)
	if p.warned || c == nil || !changed(p.base.Status.Conditions, p.sandbox.Status.Conditions, v1alpha1.ConditionReady) {
		return
	}
	if p.hindrance != "" || stuck(c.Reason) || c.Reason == p.ops.troubled(p.name).reason {
		p.warn(c.Reason, "Reconcile", c.Message)
	}
}

func (p *pass) phaseNote() string {
	st := &p.sandbox.Status
	switch st.Phase { //nolint:exhaustive // the others have only their message
	case v1alpha1.PhaseBound:
		return fmt.Sprintf("attempt %d is assigned to agent %s", st.Attempt, st.AssignedPod)
	case v1alpha1.PhaseRunning:
		return fmt.Sprintf("container %s runs on node %s", st.SandboxID, st.NodeName)
	}
	return strings.TrimSuffix(strings.TrimSpace(st.Reason+": "+st.Message), ":")
}

func (p *pass) event(kind, reason, action, note string) {
	p.Recorder.Eventf(p.sandbox, nil, kind, conditionReason(reason), action, "%s", truncate(note, 1000))
}

func (p *pass) warn(reason, action, note string) {
	p.warned = true
	p.event(corev1.EventTypeWarning, reason, action, note)
}

func changed(old, now []metav1.Condition, kind string) bool {
	a, b := meta.FindStatusCondition(old, kind), meta.FindStatusCondition(now, kind)
	return b != nil && (a == nil || a.Status != b.Status || a.Reason != b.Reason)
}

// camel turns NO_CAPACITY into NoCapacity.
func camel(r fault.Reason) string {
	var b strings.Builder
	for word := range strings.SplitSeq(string(r), "_") {
		if word != "" {
			b.WriteString(word[:1] + strings.ToLower(word[1:]))
		}
	}
	return cmp.Or(b.String(), "Unknown")
}

// conditionReason makes a word that the API server takes as a condition's reason.
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

// messageOf is what people are told of an error, without its cause where it is a fault.
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

func result(err error) string {
	if err != nil {
		return "error"
	}
	return "ok"
}

func micro(t *timestamppb.Timestamp) *metav1.MicroTime {
	if t == nil {
		return nil
	}
	return &metav1.MicroTime{Time: t.AsTime().Truncate(1000)}
}
