package create

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"

	"github.com/containerd/errdefs"
)

func TestStageTimer(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	timer := newStageTimer(clock)
	after := func(d time.Duration, sb *sandboxv1.Sandbox, done bool) {
		clock.Step(d)
		timer.observe(sb, "u", done)
	}
	status := func(st *sandboxv1.SandboxStatus) *sandboxv1.Sandbox { return &sandboxv1.Sandbox{Uid: "u", Status: st} }
	clock.Step(time.Millisecond)
	timer.end("record")
	after(time.Millisecond, status(nil), false)
	after(time.Millisecond, &sandboxv1.Sandbox{Uid: "other", Status: &sandboxv1.SandboxStatus{AssignedPod: "a"}}, false)
	after(time.Millisecond, status(&sandboxv1.SandboxStatus{AssignedPod: "a"}), false)
	after(time.Millisecond, status(&sandboxv1.SandboxStatus{AssignedPod: "a", StartTime: timestamppb.Now()}), false)
	after(time.Millisecond, status(&sandboxv1.SandboxStatus{AssignedPod: "a", StartTime: timestamppb.Now()}), true)
	after(time.Millisecond, status(&sandboxv1.SandboxStatus{AssignedPod: "a", StartTime: timestamppb.Now()}), true)
	var got []string
	for _, s := range timer.stages {
		got = append(got, s.GetStage()+" "+s.GetDuration().AsDuration().String())
	}
	require.Equal(t, []string{"record 1ms", "schedule 3ms", "agent 1ms", "status 1ms"}, got)
}

func TestStagesAreNeverNegative(t *testing.T) {
	var s stages
	s.add("agent", -time.Second)
	require.Zero(t, s[0].GetDuration().AsDuration())
}

// TestStageNames: a stage that the API gains needs a name.
func TestStageNames(t *testing.T) {
	seen := map[string]bool{}
	for n := range agentv1.CreateStage_name {
		name := stageName(agentv1.CreateStage(n))
		require.Equal(t, n == 0, name == "", agentv1.CreateStage(n))
		require.False(t, seen[name])
		seen[name] = true
	}
}

func TestRetryable(t *testing.T) {
	for reason, want := range map[fault.Reason]bool{
		fault.NoCapacity: true, fault.PortConflict: true, fault.AgentUnavailable: true, fault.AgentDraining: true, fault.Internal: true,
		fault.ImageNotFound: false, fault.CommandNotFound: false, fault.InvalidField: false, fault.UserNotFound: false,
	} {
		require.Equal(t, want, retryable(fault.New(errdefs.ErrUnavailable, reason, "no")), reason)
	}
}

func TestInFlight(t *testing.T) {
	f := NewInFlight()
	require.False(t, f.Any())
	f.set("u", true)
	require.True(t, f.Has("u"))
	require.False(t, f.Has("v"))
	require.True(t, f.Any())
	f.set("u", false)
	require.False(t, f.Any())
}

func TestFailed(t *testing.T) {
	for reason, class := range map[fault.Reason]func(error) bool{
		fault.ImageNotFound: errdefs.IsNotFound, fault.ImagePullFailed: errdefs.IsUnavailable, fault.NoCapacity: errdefs.IsResourceExhausted,
		fault.CommandNotFound: errdefs.IsFailedPrecondition, fault.InvalidField: errdefs.IsInvalidArgument,
	} {
		err := failed(&sandboxv1.SandboxStatus{Reason: string(reason), Message: "m"})
		require.True(t, class(err), reason)
		require.Equal(t, reason, fault.ReasonOf(err))
	}
	err := failed(&sandboxv1.SandboxStatus{Reason: "OOMKilled"})
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(err), "a reason that is none of the API's errors")
}
