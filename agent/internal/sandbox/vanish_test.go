package sandbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// TestAVanishedContainerGivesItsPlaceBack: of a sandbox whose container somebody else removed nothing is left, and of others
// nothing is lost.
func TestAVanishedContainerGivesItsPlaceBack(t *testing.T) {
	w := newWorld(t, nil)
	ids := map[string]string{}
	for _, uid := range []string{"vanished", "ended", "running"} {
		ids[uid] = w.mustCreate(t, record(uid, 1)).GetContainerId()
	}
	for _, uid := range []string{"vanished", "ended"} {
		w.runtime.Exit(ids[uid], runtime.Exit{Code: 137})
		require.Eventually(t, func() bool { return w.state(uid) == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, patience, tick)
	}
	require.NoError(t, w.DropVanished(t.Context()))
	require.Len(t, w.Reports(), 3)

	require.NoError(t, w.runtime.Delete(t.Context(), ids["vanished"]))
	w.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpList {
			return errors.New("containerd is away")
		}
		return nil
	})
	require.ErrorContains(t, w.DropVanished(t.Context()), "away")
	require.Len(t, w.Reports(), 3, "an error is no evidence")
	w.runtime.Hook(nil)
	require.NoError(t, w.DropVanished(t.Context()))
	require.Eventually(t, func() bool { return len(w.Reports()) == 2 }, patience, tick)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_STOPPED, w.state("ended"))
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, w.state("running"))
	require.NoDirExists(t, w.root+"/"+ids["vanished"])
	require.NoError(t, w.DropVanished(t.Context()))
	w.mustCreate(t, record("next", 1))
}
