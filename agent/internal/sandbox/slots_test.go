package sandbox_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// fakeSlots is a Slots with a few slots, which records the calls.
type fakeSlots struct {
	mu      sync.Mutex
	free    []string
	rooms   []int
	dropped []string
	busy    int
}

func (s *fakeSlots) SetRoom(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rooms = append(s.rooms, n)
}

func (s *fakeSlots) Begin() func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.busy--
	}
}

func (s *fakeSlots) Take(string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.free) == 0 {
		return "", false
	}
	id := s.free[0]
	s.free = s.free[1:]
	return id, true
}

func (s *fakeSlots) Drop(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropped = append(s.dropped, ids...)
}

func (s *fakeSlots) lastRoom() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rooms[len(s.rooms)-1]
}

// withSlots returns a testEnv whose agent has n started slots.
func withSlots(t *testing.T, n int) (*testEnv, *fakeSlots) {
	t.Helper()
	s := &fakeSlots{}
	rt := newRuntime()
	env := boot(t, rt, t.TempDir(), func(c *sandbox.Config) {
		c.Slots, c.Claimer = s, rt
		for i := range n {
			id := identity.SlotID(fmt.Sprint(i))
			paths, err := c.Logs.Create(id, "")
			require.NoError(t, err)
			require.NoError(t, rt.StartSlot(t.Context(), runtime.Slot{
				ID: id, LogPath: paths.Output, HostnamePath: paths.Hostname,
				Labels: identity.Identity{AgentUID: agentUID, Pool: "default", State: identity.StateSlot}.Labels(),
			}))
		}
	})
	require.NoError(t, env.Adopt(t.Context()))
	// Adopt has dropped the slots that were started before it.
	s.dropped = nil
	for i := range n {
		id := identity.SlotID(fmt.Sprint(i))
		_, err := env.logs.Create(id, "")
		require.NoError(t, err)
		s.free = append(s.free, id)
	}
	env.SetAccepting(true, "")
	return env, s
}

func TestCreateClaimsSlot(t *testing.T) {
	env, s := withSlots(t, 1)
	require.Equal(t, 3, s.lastRoom())
	var stages []agentv1.CreateStage
	report, err := env.Create(t.Context(), record("a", 1), false, func(st sandbox.StageTiming) { stages = append(stages, st.Stage) })
	require.NoError(t, err)
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, report.GetStartPath())
	require.Equal(t, "slot.0", report.GetContainerId())
	require.Equal(t, []agentv1.CreateStage{
		agentv1.CreateStage_CREATE_STAGE_ADMITTED, agentv1.CreateStage_CREATE_STAGE_IMAGE, agentv1.CreateStage_CREATE_STAGE_SNAPSHOT,
		agentv1.CreateStage_CREATE_STAGE_CONTAINER, agentv1.CreateStage_CREATE_STAGE_CLAIM, agentv1.CreateStage_CREATE_STAGE_STARTED,
	}, stages)
	require.Equal(t, 2, s.lastRoom())
	require.Zero(t, s.busy)
	f, ok := env.runtime.Found("slot.0")
	require.True(t, ok)
	require.False(t, f.Claiming)
	i, err := identity.Parse(f.Labels)
	require.NoError(t, err)
	require.Equal(t, "a", i.SandboxUID)

	cold := env.mustCreate(t, record("b", 1))
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, cold.GetStartPath(), "without a slot the create takes the cold path")
	require.Equal(t, "b-1", cold.GetContainerId())

	// Every call finds the sandbox under the slot's id.
	require.NoError(t, env.MarkPersisted(t.Context(), record("a", 1).GetFence()))
	id, _, err := env.Log(t.Context(), record("a", 1).GetFence())
	require.NoError(t, err)
	require.Equal(t, "slot.0", id)
	for _, uid := range []string{"a", "b"} {
		_, _, err = env.delete(t.Context(), record(uid, 1).GetFence(), 0)
		require.NoError(t, err)
	}
	require.Equal(t, 3, s.lastRoom())
	env.requireNothing(t)
}

func TestSandboxWithoutNetworkTakesColdPath(t *testing.T) {
	env, s := withSlots(t, 1)
	report := env.mustCreate(t, record("a", 1, func(r *agentv1.SandboxRecord) { r.Spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE }))
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, report.GetStartPath())
	require.Len(t, s.free, 1)
}

func TestLostSlotFallsBackToColdPath(t *testing.T) {
	env, s := withSlots(t, 1)
	env.runtime.Exit("slot.0", runtime.Exit{Code: 137})
	report := env.mustCreate(t, record("a", 1))
	require.Equal(t, sandboxv1.StartPath_START_PATH_COLD, report.GetStartPath())
	require.Equal(t, "a-1", report.GetContainerId())
	require.Equal(t, []string{"slot.0"}, s.dropped)
}

func TestInvalidCommandConsumesSlot(t *testing.T) {
	env, _ := withSlots(t, 1)
	_, err := env.create(t.Context(), record("a", 1, command("nope")))
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.CommandNotFound)
	env.requireNothing(t)
	require.True(t, env.Accepting())
}

func TestCanceledClaimLeavesNothing(t *testing.T) {
	env, _ := withSlots(t, 1)
	ctx, cancel := context.WithCancel(t.Context())
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpGo {
			cancel()
			<-ctx.Done()
		}
		return nil
	})
	_, err := env.create(ctx, record("a", 1))
	require.ErrorIs(t, err, context.Canceled)
	env.runtime.Hook(nil)
	require.Eventually(t, func() bool { return len(env.runtime.IDs()) == 0 && len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
}

func TestSlotsAreReportedAndDrained(t *testing.T) {
	env, s := withSlots(t, 0)
	watch, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(watch)
	require.Nil(t, watch.Snapshot.GetSlots())
	for range 2 {
		env.status.SetSlots(&agentv1.SlotStatus{Free: 2, Wanted: 3})
	}
	require.Equal(t, int32(2), (<-watch.Deltas()).GetSlots().GetFree())
	require.Empty(t, watch.Deltas(), "an unchanged status is not sent")
	_, err = env.Drain(t.Context(), agentUID, false)
	require.NoError(t, err)
	require.Zero(t, s.lastRoom(), "a drained agent needs none")
	_, err = env.Drain(t.Context(), agentUID, true)
	require.NoError(t, err)
	require.Equal(t, 3, s.lastRoom())
}

// TestCrashDuringClaim stops a create before each of its steps, and starts another manager that adopts.
func TestCrashDuringClaim(t *testing.T) {
	for _, c := range []struct {
		step fake.Op
		// claimed: the container has the sandbox's labels.
		claimed bool
	}{{fake.OpClaim, false}, {fake.OpGo, true}, {fake.OpStart, true}, {fake.OpClaimed, true}} {
		for _, persisted := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, persisted %t", c.step, persisted), func(t *testing.T) {
				env, _ := withSlots(t, 1)
				reached, release := make(chan struct{}), make(chan struct{})
				once := sync.OnceFunc(func() { close(reached) })
				env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
					if op == c.step {
						once()
						<-release
					}
					return nil
				})
				done := make(chan struct{})
				go func() {
					defer close(done)
					_, _ = env.Create(t.Context(), record("a", 1), persisted, func(sandbox.StageTiming) {})
				}()
				defer func() { close(release); <-done }()
				<-reached
				f, ok := env.runtime.Found("slot.0")
				require.True(t, ok)
				i, err := identity.Parse(f.Labels)
				require.NoError(t, err, "it is a slot or a sandbox, never a mixture")
				require.Equal(t, c.claimed, i.State == identity.StateClaimed)
				require.Equal(t, c.claimed, f.Record != nil)

				next := &fakeSlots{}
				second := boot(t, env.runtime, env.root, func(cfg *sandbox.Config) { cfg.Slots, cfg.Claimer = next, env.runtime })
				require.NoError(t, second.Adopt(t.Context()))
				require.Empty(t, second.reports(), "it was never acknowledged")
				require.True(t, slices.Contains(next.dropped, "slot.0"))
			})
		}
	}
}

func TestClaimedSlotIsAdopted(t *testing.T) {
	env, _ := withSlots(t, 1)
	want := env.mustCreate(t, record("a", 1))
	next := &fakeSlots{}
	second := boot(t, env.runtime, env.root, func(cfg *sandbox.Config) { cfg.Slots, cfg.Claimer = next, env.runtime })
	require.NoError(t, second.Adopt(t.Context()))
	require.Empty(t, next.dropped)
	reports := second.reports()
	require.Len(t, reports, 1)
	require.Equal(t, want.GetContainerId(), reports[0].GetContainerId())
	require.Equal(t, sandboxv1.StartPath_START_PATH_SLOT, reports[0].GetStartPath())
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, reports[0].GetState())
}
