package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func (f *fixture) leftovers(forgotten *[]types.NamespacedName) *leftovers {
	return &leftovers{live: f.client, deleter: f.remover().deleter, allocator: f.allocator, background: f.background, memory: f.memory, timing: timing,
		clock: f.clock, forget: func(n types.NamespacedName) { *forgotten = append(*forgotten, n); f.memory.forget(n) }}
}

func (f *fixture) remember(grace *time.Duration) {
	f.memory.holds.update(name, func(h *hold) { *h = hold{assigned, grace} })
}

func TestLeftoverIsRemoved(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.deleted = removedResponse()
	grace := 7 * time.Second
	f.remember(&grace)
	var forgotten []types.NamespacedName
	require.NoError(t, f.leftovers(&forgotten).collect(t.Context(), name, ""))
	require.Eventually(t, func() bool { return len(f.allocator.released()) == 1 }, testkit.Timeout, testkit.Tick)
	require.Equal(t, fence, f.allocator.released()[0])
	req := f.agents.service.deleteRequests()[0]
	require.Equal(t, fence, identity.FenceOf(req.GetFence()))
	require.Equal(t, grace, req.GetGracePeriod().AsDuration())
	require.Equal(t, []types.NamespacedName{name}, forgotten)
	require.NoError(t, f.leftovers(&forgotten).collect(t.Context(), name, ""))
	require.Len(t, forgotten, 1, "once")
}

func TestNoLeftover(t *testing.T) {
	for _, tt := range []struct {
		name     string
		current  string // in the cache
		live     bool
		remember bool
	}{
		{"nothing is remembered", "", false, false},
		{"the sandbox exists", "uid", true, true},
		{"only the cache does not have it", "", true, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			if tt.live {
				require.NoError(t, f.client.Create(t.Context(), newSandbox(onAgent)))
			}
			if tt.remember {
				f.remember(nil)
			}
			var forgotten []types.NamespacedName
			require.NoError(t, f.leftovers(&forgotten).collect(t.Context(), name, tt.current))
			require.Empty(t, forgotten)
		})
	}
}

func TestLeftoverOfAnotherIncarnation(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.deleted = removedResponse()
	successor := newSandbox()
	successor.UID = "successor"
	require.NoError(t, f.client.Create(t.Context(), successor))
	f.remember(nil)
	var forgotten []types.NamespacedName
	require.NoError(t, f.leftovers(&forgotten).collect(t.Context(), name, "successor"))
	require.Eventually(t, func() bool { return len(f.allocator.released()) == 1 }, testkit.Timeout, testkit.Tick)
}

// TestLeftoverRemovalIsRetried until the agent answers or its Pod does not exist.
func TestLeftoverRemovalIsRetried(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.callErr = errUnreachable
	f.remember(nil)
	var forgotten []types.NamespacedName
	require.NoError(t, f.leftovers(&forgotten).collect(t.Context(), name, ""))
	calls := func(n int) func() bool { return func() bool { return len(f.agents.service.deleteRequests()) == n } }
	for n := 1; n <= 3; n++ {
		require.Eventually(t, func() bool { return calls(n)() && f.clock.HasWaiters() }, testkit.Timeout, testkit.Tick)
		if n == 3 {
			require.NoError(t, f.client.Delete(t.Context(), agentPod()))
		}
		f.clock.Step(4 * timing.Requeue)
	}
	require.Eventually(t, calls(4), testkit.Timeout, testkit.Tick)
	require.Empty(t, f.allocator.released())
}
