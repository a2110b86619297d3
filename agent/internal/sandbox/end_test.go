package sandbox_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestEndReportsTheReason: what the agent ends by itself has its reason, and its capacity is free.
func TestEndReportsTheReason(t *testing.T) {
	env := newEnv(t, nil)
	for _, uid := range []string{"a", "b", "c"} {
		env.mustCreate(t, record(uid, 1))
	}
	require.ElementsMatch(t, []string{"a-1", "b-1", "c-1"}, env.Running())
	_, _, err := env.delete(t.Context(), record("c", 1).GetFence(), 0)
	require.NoError(t, err)
	require.NoError(t, env.End(t.Context(), "a-1", "DiskLimitExceeded", "too many files"))
	require.Eventually(t, func() bool { return env.state("a") == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, testkit.Timeout, testkit.Tick)
	for _, r := range env.reports() {
		if r.GetRecord().GetName() == "sb-a" {
			require.Equal(t, "DiskLimitExceeded", r.GetReason())
			require.Equal(t, "too many files", r.GetMessage())
			require.EqualValues(t, 137, r.GetExitCode())
		}
	}
	require.Equal(t, []string{"b-1"}, env.Running())
	require.NoError(t, env.End(t.Context(), "a-1", "other", "again"))
	require.NoError(t, env.End(t.Context(), "unknown", "other", ""))
	env.mustCreate(t, record("d", 1))
	env.mustCreate(t, record("e", 1))
}

// TestKilledWithItsAgent kills sandboxes as a kubelet does that deletes the agent's Pod: one whose agent is ending is not reported as ended, so
// that its failure policy for a lost agent applies, and one whose agent stays is.
func TestKilledWithItsAgent(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	env := newEnv(t, func(c *sandbox.Config) { c.Clock = clock })
	env.mustCreate(t, record("a", 1))
	waiting := clock.Waiters()
	env.runtime.Exit("a-1", runtime.Exit{Code: 137})
	require.Eventually(t, func() bool { return clock.Waiters() > waiting }, testkit.Timeout, testkit.Tick)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, env.state("a"))
	clock.Step(time.Second)
	require.Eventually(t, func() bool { return env.state("a") == stateStopped }, testkit.Timeout, testkit.Tick)

	env.mustCreate(t, record("b", 1))
	waiting = clock.Waiters()
	env.runtime.Exit("b-1", runtime.Exit{Code: 137})
	require.Eventually(t, func() bool { return clock.Waiters() > waiting }, testkit.Timeout, testkit.Tick)
	require.NoError(t, env.Close(t.Context()))
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, env.state("b"))
}
