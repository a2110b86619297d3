package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	yes = metav1.ConditionTrue
	no  = metav1.ConditionFalse
)

func finishedSandbox(s *v1alpha1.Sandbox) {
	s.Status.Phase, s.Status.ExitCode, s.Status.FinishTime = v1alpha1.PhaseRunning, ptr.To(int32(0)), &metav1.MicroTime{Time: start}
	withCondition(v1alpha1.ConditionFinished, yes, "Completed")(s)
}

func TestConclude(t *testing.T) {
	type conditions = map[string]string
	causeOf := func(reason string) *cause { return &cause{reason, "because"} }
	wasLost := withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable")
	for _, tt := range []struct {
		name    string
		base    []change
		change  func(*target) // between base and conclude
		result  result
		lost    bool
		reason  string
		message string
		want    conditions // as "True Reason"
	}{
		{name: "new", want: conditions{"Scheduled": "False Pending", "Ready": "False Pending"}},
		{
			name: "unplaced", base: []change{inPhase(v1alpha1.PhasePending)}, result: result{cause: causeOf("NoCapacity"), unplaced: causeOf("NoCapacity")},
			reason: "NoCapacity", message: "because", want: conditions{"Scheduled": "False NoCapacity", "Ready": "False NoCapacity"},
		},
		{
			name: "creating", base: []change{inPhase(v1alpha1.PhaseBound), onAgent}, result: result{cause: causeOf("Creating")},
			reason: "Creating", message: "because", want: conditions{"Scheduled": "True Assigned", "Ready": "False Creating"},
		},
		{name: "running", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent}, want: conditions{"Scheduled": "True Assigned", "Ready": "True Running"}},
		{
			name: "running, fast", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent, onFastPath},
			want: conditions{"Scheduled": "True FastPath", "Ready": "True Running"},
		},
		{
			name: "becomes Running", base: []change{inPhase(v1alpha1.PhaseBound), onAgent, func(s *v1alpha1.Sandbox) { s.Status.Reason = "Creating" }},
			change: func(x *target) { x.sandbox.Status.Phase = v1alpha1.PhaseRunning },
			want:   conditions{"Scheduled": "True Assigned", "Ready": "True Running"},
		},
		{
			name: "completed", base: []change{onAgent, finishedSandbox}, reason: "Completed",
			want: conditions{"Scheduled": "True Assigned", "Ready": "False Completed"},
		},
		{
			name: "failed", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent},
			change: func(x *target) { x.sandbox.Status.Phase = v1alpha1.PhaseFailed }, result: result{cause: causeOf("Error")},
			reason: "Error", message: "because", want: conditions{"Scheduled": "True Assigned", "Ready": "False Error"},
		},
		{
			name: "the first cause of a failure stays", base: []change{inPhase(v1alpha1.PhaseFailed), func(s *v1alpha1.Sandbox) { s.Status.Reason = "OOMKilled" }},
			result: result{cause: causeOf("Error")}, reason: "OOMKilled", want: conditions{"Scheduled": "False Failed", "Ready": "False OOMKilled"},
		},
		{
			name: "expired", base: []change{inPhase(v1alpha1.PhaseExpired)}, reason: "Expired", message: "the expire time has passed",
			want: conditions{"Scheduled": "False Expired", "Ready": "False Expired"},
		},
		{
			name: "lost", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent}, lost: true,
			want: conditions{"Scheduled": "True Assigned", "Ready": "False AgentLost", "AgentLost": "True AgentUnavailable"},
		},
		{
			name: "back", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent, wasLost},
			want: conditions{"Scheduled": "True Assigned", "Ready": "True Running", "AgentLost": "False AgentReachable"},
		},
		{
			name: "lost before the assignment was cleared", base: []change{inPhase(v1alpha1.PhasePending), wasLost}, lost: true,
			want: conditions{"Scheduled": "False Pending", "Ready": "False Pending", "AgentLost": "False AgentReachable"},
		},
		{
			name: "terminating", base: []change{inPhase(v1alpha1.PhaseTerminating), onAgent, deleted}, result: result{cause: causeOf("Terminating"), removing: true},
			reason: "Terminating", message: "because", want: conditions{"Scheduled": "True Assigned", "Ready": "False Terminating"},
		},
		{
			name: "terminating and blocked", base: []change{inPhase(v1alpha1.PhaseTerminating), onAgent, deleted},
			result: result{cause: causeOf("Terminating"), removing: true, blocked: &cause{"AgentUnreachable", "no answer"}},
			reason: "Terminating", message: "no answer", want: conditions{"Scheduled": "True Assigned", "Ready": "False AgentUnreachable"},
		},
		{
			name: "resetting", base: []change{inPhase(v1alpha1.PhaseRunning), onAgent}, result: result{cause: causeOf("Resetting"), removing: true},
			reason: "Resetting", message: "because", want: conditions{"Scheduled": "True Assigned", "Ready": "False Resetting"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := targetOf(t, newSandbox(tt.base...))
			if tt.change != nil {
				tt.change(x)
			}
			conclude(x, tt.result, tt.lost)
			st := x.sandbox.Status
			require.Equal(t, tt.reason, st.Reason)
			require.Equal(t, tt.message, st.Message)
			got := conditions{}
			for _, c := range st.Conditions {
				if c.Type != v1alpha1.ConditionFinished {
					got[c.Type] = fmt.Sprintf("%s %s", c.Status, c.Reason)
				}
			}
			require.Equal(t, tt.want, got)
			require.Equal(t, int64(1), st.ObservedGeneration)
		})
	}
}

// TestObservedGenerationOfADeletion: until the phase is Terminating, the status is about the generation before.
func TestObservedGenerationOfADeletion(t *testing.T) {
	x := targetOf(t, newSandbox(inPhase(v1alpha1.PhaseRunning), onAgent, deleted))
	conclude(x, result{}, false)
	require.Zero(t, x.sandbox.Status.ObservedGeneration)
}

func TestRecordEnd(t *testing.T) {
	x := targetOf(t, newSandbox(inPhase(v1alpha1.PhaseRunning), onAgent))
	recordEnd(x, &cause{"Completed", "code 0"})
	require.True(t, x.sandbox.Status.FinishTime.Time.Equal(start), "without a time of the agent, that of the controller counts")
	c := meta.FindStatusCondition(x.sandbox.Status.Conditions, v1alpha1.ConditionFinished)
	require.Equal(t, "Completed", c.Reason)
	earlier := metav1.NewMicroTime(start.Add(-1))
	x.sandbox.Status.FinishTime = &earlier
	recordEnd(x, &cause{"Completed", "code 0"})
	require.Equal(t, earlier, *x.sandbox.Status.FinishTime)
}

func TestConditionReason(t *testing.T) {
	for in, want := range map[string]string{
		"NoCapacity": "NoCapacity", "": "Unknown", "with spaces, etc.": "withspacesetc", "1st": "Unknown1st", "ünïcode": "ncode",
	} {
		require.Equal(t, want, conditionReason(in), in)
	}
	require.Len(t, conditionReason(strings.Repeat("x", 500)), 128)
}

func TestCamel(t *testing.T) {
	for in, want := range map[fault.Reason]string{fault.NoCapacity: "NoCapacity", "": "Unknown", "A": "A", "_X__Y_": "XY"} {
		require.Equal(t, want, camel(in), string(in))
	}
}

func TestMessageOf(t *testing.T) {
	require.Equal(t, "full", messageOf(fmt.Errorf("creating: %w", fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"))))
	require.Equal(t, "plain", messageOf(errors.New("plain")))
	require.Len(t, messageOf(errors.New(strings.Repeat("x", 5000))), 1024)
	require.Equal(t, "ab", truncate("abé", 3), "a character is not cut")
}

func TestPhaseNote(t *testing.T) {
	for _, tt := range []struct {
		status v1alpha1.SandboxStatus
		want   string
	}{
		{v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseBound, Attempt: 2, AssignedPod: "p"}, "attempt 2 is assigned to agent p"},
		{v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseRunning, SandboxID: "c", NodeName: "n"}, "container c runs on node n"},
		{v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseFailed, Reason: "Error", Message: "code 1"}, "Error: code 1"},
		{v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseFailed, Reason: "Error"}, "Error"},
	} {
		require.Equal(t, tt.want, phaseNote(&tt.status))
	}
}
