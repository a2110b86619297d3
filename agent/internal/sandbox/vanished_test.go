package sandbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestVanishedContainerIsDropped removes the container of one of three sandboxes as another component would.
func TestVanishedContainerIsDropped(t *testing.T) {
	env := newEnv(t, nil)
	ids := map[string]string{}
	for _, uid := range []string{"vanished", "ended", "running"} {
		ids[uid] = env.mustCreate(t, record(uid, 1)).GetContainerId()
	}
	for _, uid := range []string{"vanished", "ended"} {
		env.runtime.Exit(ids[uid], runtime.Exit{Code: 137})
		require.Eventually(t, func() bool { return env.state(uid) == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, testkit.Timeout, testkit.Tick)
	}
	require.NoError(t, env.DropVanished(t.Context()))
	require.Len(t, env.reports(), 3)

	require.NoError(t, env.runtime.Delete(t.Context(), ids["vanished"]))
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpList {
			return errors.New("containerd is away")
		}
		return nil
	})
	require.ErrorContains(t, env.DropVanished(t.Context()), "away")
	require.Len(t, env.reports(), 3, "an error is not evidence")
	env.runtime.Hook(nil)
	require.NoError(t, env.DropVanished(t.Context()))
	require.Eventually(t, func() bool { return len(env.reports()) == 2 }, testkit.Timeout, testkit.Tick)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_STOPPED, env.state("ended"))
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, env.state("running"))
	require.NoDirExists(t, env.root+"/"+ids["vanished"])
	require.NoError(t, env.DropVanished(t.Context()))
	env.mustCreate(t, record("next", 1))
}
