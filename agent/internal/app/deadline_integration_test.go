//go:build integration

package app_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestCanceledCreateIsCleanedUpAtOnce cancels creates in every stage. A shim takes more than 5 s to delete a task that never
// ran: the median shows, on the slowest machine, whether the agent asked for that.
func TestCanceledCreateIsCleanedUpAtOnce(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	var clean []time.Duration
	for i := range 24 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(2+i*6)*time.Millisecond)
		r := record(fmt.Sprintf("late-%d", i), nil)
		begun := time.Now()
		_, err := a.create(ctx, r)
		cancel()
		cut := time.Now()
		if err == nil {
			a.delete(t, r.GetFence(), 0)
		}
		require.Eventually(t, func() bool {
			list, err := s.Client.ContainerService().List(t.Context())
			require.NoError(t, err)
			there := a.snapshot(t).GetSandboxes()
			if len(there) == 1 && there[0].GetState() == agentv1.SandboxState_SANDBOX_STATE_RUNNING {
				// The answer came before the deadline: the sandbox is complete.
				_, err := a.tryDelete(t.Context(), r.GetFence(), 0)
				require.NoError(t, err)
			}
			return len(list) == 0 && len(there) == 0
		}, testkit.Timeout, testkit.Tick)
		took := time.Since(cut)
		t.Logf("deadline %v: ended after %v (%v), clean %v later", time.Duration(2+i*6)*time.Millisecond, cut.Sub(begun), err, took)
		if err != nil {
			clean = append(clean, took)
		}
	}
	require.NotEmpty(t, clean, "no create was canceled")
	t.Logf("the cleanup took %v (p50), at most %v", p50(clean), slices.Max(clean))
	require.Less(t, p50(clean), 4*time.Second)
	s.CheckClean(t)
}
