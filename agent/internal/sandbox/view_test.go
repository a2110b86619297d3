package sandbox_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestEndingComesOnce: the end of each process is announced once, however it has ended, and while the container exists.
func TestEndingComesOnce(t *testing.T) {
	rt := newRuntime()
	var mu sync.Mutex
	ended := map[string]int{}
	existed := map[string]bool{}
	env := boot(t, rt, t.TempDir(), func(c *sandbox.Config) {
		c.Ending = func(ctx context.Context, s sandbox.Started) {
			mu.Lock()
			defer mu.Unlock()
			ended[s.ID]++
			existed[s.ID] = slices.Contains(rt.IDs(), s.ID) && ctx.Err() == nil && s.StartTime().IsValid()
		}
	})
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	for _, uid := range []string{"exits", "deleted"} {
		env.mustCreate(t, record(uid, 1))
	}
	view := sandbox.NewView(env.Manager)
	require.Len(t, view.Running(), 2)
	rt.Exit("exits-1", runtime.Exit{Code: 1})
	require.Eventually(t, func() bool { return env.state("exits") == stateStopped }, testkit.Timeout, testkit.Tick)
	_, _, err := env.delete(t.Context(), record("deleted", 1).GetFence(), 0)
	require.NoError(t, err)
	mu.Lock()
	require.Equal(t, map[string]int{"exits-1": 1, "deleted-1": 1}, ended)
	require.Equal(t, map[string]bool{"exits-1": true, "deleted-1": true}, existed)
	mu.Unlock()
	require.Empty(t, view.Running())

	s, err := view.Find(t.Context(), record("exits", 1).GetFence())
	require.NoError(t, err)
	require.EqualValues(t, 1, s.Report.GetExitCode())
	<-s.Ended
	_, err = view.Find(t.Context(), &agentv1.Fence{SandboxUid: "exits", Attempt: 2, AgentUid: agentUID})
	require.Equal(t, fault.FenceMismatch, fault.ReasonOf(err))
}
