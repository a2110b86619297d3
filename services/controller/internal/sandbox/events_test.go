package sandbox

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func TestAnnounce(t *testing.T) {
	for _, tt := range []struct {
		name      string
		base      []change
		change    func(*v1alpha1.Sandbox)
		result    result
		lastError *cause
		want      []string
	}{
		{name: "nothing has changed", base: []change{inPhase(v1alpha1.PhaseRunning)}},
		{
			name: "a new phase", base: []change{inPhase(v1alpha1.PhasePending), onAgent},
			change: func(s *v1alpha1.Sandbox) {
				s.Status.Phase, s.Status.AssignedPod = v1alpha1.PhaseBound, "agent-1"
			},
			want: []string{"Normal Bound attempt 1 is assigned to agent agent-1"},
		},
		{
			name: "a failure", base: []change{inPhase(v1alpha1.PhaseRunning)},
			change: func(s *v1alpha1.Sandbox) {
				s.Status.Phase, s.Status.Reason, s.Status.Message = v1alpha1.PhaseFailed, "Error", "the process ended with code 1"
			},
			want: []string{"Warning Failed Error: the process ended with code 1"},
		},
		{
			name: "no agent was found", base: []change{inPhase(v1alpha1.PhasePending)},
			change: withCondition(v1alpha1.ConditionScheduled, no, "NoCapacity"), result: result{unplaced: &cause{"NoCapacity", "full"}},
			want: []string{"Warning NoCapacity not placed: full"},
		},
		{
			name: "still no agent", base: []change{inPhase(v1alpha1.PhasePending), withCondition(v1alpha1.ConditionScheduled, no, "NoCapacity")},
			result: result{unplaced: &cause{"NoCapacity", "full"}},
		},
		{
			name: "lost", base: []change{inPhase(v1alpha1.PhaseRunning)}, change: withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable"),
			want: []string{"Warning AgentLost "},
		},
		{
			name: "back", base: []change{inPhase(v1alpha1.PhaseRunning), withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable")},
			change: func(s *v1alpha1.Sandbox) {
				s.Status.Conditions = nil
				withCondition(v1alpha1.ConditionAgentLost, no, "AgentReachable")(s)
			},
			want: []string{"Normal AgentReturned the agent answers again, or the sandbox is no longer assigned to it"},
		},
		{
			name: "stuck", base: []change{inPhase(v1alpha1.PhaseBound)}, change: withCondition(v1alpha1.ConditionReady, no, "PullingImage"),
			want: []string{"Warning PullingImage "},
		},
		{
			name: "blocked", base: []change{inPhase(v1alpha1.PhaseRunning)}, change: withCondition(v1alpha1.ConditionReady, no, "AssignmentInvalid"),
			result: result{blocked: &cause{"AssignmentInvalid", ""}}, want: []string{"Warning AssignmentInvalid "},
		},
		{
			name: "a create is retried", base: []change{inPhase(v1alpha1.PhaseBound)}, change: withCondition(v1alpha1.ConditionReady, no, "ImagePullFailed"),
			lastError: &cause{"ImagePullFailed", ""}, want: []string{"Warning ImagePullFailed "},
		},
		{
			name: "already reported", base: []change{inPhase(v1alpha1.PhaseBound)}, change: withCondition(v1alpha1.ConditionReady, no, "PullingImage"),
			result: result{warned: true},
		},
		{
			name: "an expired sandbox was changed", base: []change{inPhase(v1alpha1.PhaseExpired)}, change: func(s *v1alpha1.Sandbox) { s.Status.ObservedGeneration = 2 },
			want: []string{"Warning StaysExpired an expired sandbox has no container, and neither a reset nor a later expire time starts one: create it again"},
		},
		{
			name: "completed", base: []change{inPhase(v1alpha1.PhaseRunning)}, change: finishedSandbox,
			want: []string{"Normal Completed the process ended with code 0"},
		},
		{
			name: "deleted with a malformed grace period", base: []change{inPhase(v1alpha1.PhaseRunning), deleted, withAnnotation(v1alpha1.AnnotationDeleteGracePeriod, "soon")},
			change: inPhase(v1alpha1.PhaseTerminating),
			want: []string{"Normal Terminating ", "Warning InvalidGracePeriod the grace period of the delete call is ignored: " +
				`decoding annotation fast-sandbox.io/delete-grace-period-seconds: "soon" is not a number from 0 to 3600`},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			a := &announcer{events: eventWriter{f.recorder}, memory: f.memory, metrics: f.metrics}
			if tt.lastError != nil {
				f.memory.setLastError(name, *tt.lastError)
			}
			x := targetOf(t, newSandbox(tt.base...))
			if tt.change != nil {
				tt.change(x.sandbox)
			}
			if len(x.sandbox.Status.Conditions) == 0 || x.sandbox.Status.Conditions[0].Type != v1alpha1.ConditionReady {
				withCondition(v1alpha1.ConditionReady, no, "Same")(x.base)
				withCondition(v1alpha1.ConditionReady, no, "Same")(x.sandbox)
			}
			a.announce(x, tt.result)
			require.Equal(t, tt.want, f.recorder.all())
		})
	}
}
