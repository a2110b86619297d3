package slot_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	image = "docker.io/library/busybox:1"
	other = "docker.io/library/python:3"
)

var plenty = slot.Memory{Total: 100 << 30, Available: 50 << 30}

// testEnv is a running pool on a fake runtime and a fake clock.
type testEnv struct {
	*slot.Pool

	runtime *fake.Runtime
	clock   *clocktesting.FakeClock
	stop    func()

	mu       sync.Mutex
	memory   slot.Memory
	reported []*agentv1.SlotStatus
}

func run(t *testing.T, minimum, maximum int, change func(*slot.Config)) *testEnv {
	t.Helper()
	env := &testEnv{
		runtime: fake.New(map[string]fake.Image{image: {Local: true}, other: {Local: true}}),
		clock:   clocktesting.NewFakeClock(time.Now()), memory: plenty,
	}
	cfg := slot.Config{
		Runtime: env.runtime, Logs: logs.New(logs.Config{Root: t.TempDir(), Owner: "me"}), AgentUID: "me", AgentPool: "default", AgentProcess: "this",
		Min: minimum, Max: maximum, Clock: env.clock,
		Memory: func() (slot.Memory, error) {
			env.mu.Lock()
			defer env.mu.Unlock()
			return env.memory, nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	env.Pool = slot.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- env.Run(ctx, func(s *agentv1.SlotStatus) {
			env.mu.Lock()
			defer env.mu.Unlock()
			env.reported = append(env.reported, s)
		})
	}()
	env.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(func() { env.runtime.Hook(nil); env.stop() })
	return env
}

func (env *testEnv) status() *agentv1.SlotStatus {
	env.mu.Lock()
	defer env.mu.Unlock()
	if len(env.reported) == 0 {
		return nil
	}
	return env.reported[len(env.reported)-1]
}

// requireSlots waits for a status.
func (env *testEnv) requireSlots(t *testing.T, free, wanted int32) {
	t.Helper()
	require.Eventually(t, func() bool {
		s := env.status()
		return s.GetFree() == free && s.GetWanted() == wanted
	}, testkit.Timeout, testkit.Tick, "want %d of %d free, the status is %v", free, wanted, env)
}

func (env *testEnv) setMemory(m slot.Memory) {
	env.mu.Lock()
	env.memory = m
	env.mu.Unlock()
	env.clock.Step(2 * time.Second)
}

func (env *testEnv) String() string { return env.status().String() }

func TestOneSlotForEachFreeUnit(t *testing.T) {
	env := run(t, 0, -1, nil)
	env.requireSlots(t, 0, 0)
	env.SetRoom(3)
	env.requireSlots(t, 3, 3)
	require.Len(t, env.runtime.IDs(), 3)
	for _, id := range env.runtime.IDs() {
		f, ok := env.runtime.Found(id)
		require.True(t, ok)
		require.True(t, identity.IsSlotID(id))
		i, err := identity.Parse(f.Labels)
		require.NoError(t, err)
		require.Equal(t, identity.Identity{AgentUID: "me", AgentProcess: "this", Pool: "default", State: identity.StateSlot}, i)
	}
	env.SetRoom(1)
	env.requireSlots(t, 1, 1)
	require.Eventually(t, func() bool { return len(env.runtime.IDs()) == 1 }, testkit.Timeout, testkit.Tick, "the surplus is removed")
	env.stop()
	require.Empty(t, env.runtime.IDs(), "a slot ends with its agent")
}

func TestBounds(t *testing.T) {
	env := run(t, 0, 2, nil)
	env.SetRoom(5)
	env.requireSlots(t, 2, 2)
	off := run(t, 0, 0, nil)
	off.SetRoom(5)
	off.requireSlots(t, 0, 0)
	require.Empty(t, off.status().GetOffReason(), "none are wanted")
}

func TestTakenSlotIsReplaced(t *testing.T) {
	env := run(t, 0, -1, nil)
	_, ok := env.Take(image)
	require.False(t, ok)
	env.SetRoom(2)
	env.requireSlots(t, 2, 2)
	id, ok := env.Take(image)
	require.True(t, ok)
	env.SetRoom(1)
	env.requireSlots(t, 1, 1)
	require.Contains(t, env.runtime.IDs(), id, "it belongs to the caller that took it")
	env.SetRoom(2)
	env.requireSlots(t, 2, 2)
	env.Drop(id)
	require.Eventually(t, func() bool { _, exists := env.runtime.Found(id); return !exists }, testkit.Timeout, testkit.Tick)
	env.requireSlots(t, 2, 2)
}

func TestSlotsYieldToCreates(t *testing.T) {
	env := run(t, 0, -1, nil)
	done := env.Begin()
	env.SetRoom(1)
	env.requireSlots(t, 0, 1)
	require.Empty(t, env.runtime.IDs())
	done()
	env.requireSlots(t, 1, 1)
	// The delay is bounded.
	done = env.Begin()
	defer done()
	env.SetRoom(2)
	env.requireSlots(t, 1, 2)
	require.Eventually(t, func() bool {
		env.clock.Step(time.Second)
		return env.status().GetFree() == 2
	}, testkit.Timeout, testkit.Tick)
}

// TestSlotsStartTogether: several start at a time while the node is idle, and one while a create runs.
func TestSlotsStartTogether(t *testing.T) {
	env := run(t, 0, -1, func(c *slot.Config) { c.Starters = 3 })
	var mu sync.Mutex
	var running, most int
	next := make(chan struct{})
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op != fake.OpSlot {
			return nil
		}
		mu.Lock()
		running++
		most = max(most, running)
		mu.Unlock()
		defer func() { mu.Lock(); running--; mu.Unlock() }()
		select {
		case <-next:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	env.SetRoom(7)
	require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return running == 3 }, testkit.Timeout, testkit.Tick)
	done := env.Begin()
	for range 3 {
		next <- struct{}{}
	}
	env.requireSlots(t, 3, 7)
	for want := int32(4); want < 6; want++ {
		require.Eventually(t, func() bool {
			env.clock.Step(time.Second)
			mu.Lock()
			defer mu.Unlock()
			require.LessOrEqual(t, running, 1)
			return running == 1
		}, testkit.Timeout, testkit.Tick)
		next <- struct{}{}
		env.requireSlots(t, want, 7)
	}
	done()
	close(next)
	env.requireSlots(t, 7, 7)
	require.Equal(t, 3, most)
}

// TestSlotIsKeptForRunningCreate: a create takes a capacity unit before it takes its slot, which must not be removed in
// between.
func TestSlotIsKeptForRunningCreate(t *testing.T) {
	env := run(t, 0, -1, nil)
	env.SetRoom(2)
	env.requireSlots(t, 2, 2)
	started := env.runtime.IDs()
	done := env.Begin()
	env.SetRoom(1)
	env.requireSlots(t, 2, 1)
	_, ok := env.Take(image)
	require.True(t, ok)
	env.requireSlots(t, 1, 1)
	done()
	require.ElementsMatch(t, started, env.runtime.IDs())
}

// TestSurplusSlotIsRemovedAfterCreate: a create that took no slot leaves one too many.
func TestSurplusSlotIsRemovedAfterCreate(t *testing.T) {
	env := run(t, 0, -1, nil)
	env.SetRoom(1)
	env.requireSlots(t, 1, 1)
	done := env.Begin()
	env.SetRoom(0)
	env.requireSlots(t, 1, 0)
	done()
	env.requireSlots(t, 0, 0)
}

func TestSlotsAreWarmedForRecentImages(t *testing.T) {
	env := run(t, 0, -1, nil)
	var mu sync.Mutex
	warmed := map[string]int{}
	env.runtime.Hook(func(_ context.Context, op fake.Op, id string) error {
		if op == fake.OpWarm {
			mu.Lock()
			defer mu.Unlock()
			warmed[id]++
		}
		return nil
	})
	for _, i := range []string{image, other, image} {
		_, ok := env.Take(i)
		require.False(t, ok, "there is no slot, but the image is remembered")
	}
	env.SetRoom(4)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(warmed) == 4 && env.status().GetFree() == 4
	}, testkit.Timeout, testkit.Tick)
	for _, n := range warmed {
		require.Equal(t, 1, n)
	}
}

func TestMissingImageIsNotWarmedAgain(t *testing.T) {
	env := run(t, 0, -1, nil)
	asked := make(chan struct{}, 100)
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpWarm {
			asked <- struct{}{}
		}
		return nil
	})
	_, ok := env.Take("docker.io/library/gone:1")
	require.False(t, ok)
	env.SetRoom(1)
	<-asked
	env.requireSlots(t, 1, 1)
	id, ok := env.Take(image)
	require.True(t, ok)
	require.NotEmpty(t, id)
	require.LessOrEqual(t, len(asked), 1)
}

func TestEndedSlotIsReplaced(t *testing.T) {
	env := run(t, 0, -1, nil)
	env.SetRoom(1)
	env.requireSlots(t, 1, 1)
	id := env.runtime.IDs()[0]
	env.runtime.Exit(id, runtime.Exit{Code: 137})
	require.Eventually(t, func() bool {
		env.clock.Step(time.Second)
		ids := env.runtime.IDs()
		return len(ids) == 1 && ids[0] != id && env.status().GetFree() == 1
	}, testkit.Timeout, testkit.Tick)
}

func TestFailedStartsAreReportedAndRetried(t *testing.T) {
	env := run(t, 0, -1, nil)
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpSlot {
			return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd is overloaded")
		}
		return nil
	})
	env.SetRoom(1)
	require.Eventually(t, func() bool {
		env.clock.Step(time.Minute)
		return strings.Contains(env.status().GetOffReason(), "containerd is overloaded")
	}, testkit.Timeout, testkit.Tick)
	env.runtime.Hook(nil)
	require.Eventually(t, func() bool {
		env.clock.Step(time.Minute)
		return env.status().GetFree() == 1 && env.status().GetOffReason() == ""
	}, testkit.Timeout, testkit.Tick)
	require.Len(t, env.runtime.IDs(), 1, "failed starts leave nothing")
}

func TestSlotsAreRemovedWhenMemoryIsShort(t *testing.T) {
	env := run(t, 1, -1, nil)
	env.SetRoom(3)
	env.requireSlots(t, 3, 3)
	env.setMemory(slot.Memory{Total: plenty.Total, Available: 1 << 20})
	env.requireSlots(t, 1, 1)
	require.Contains(t, env.status().GetOffReason(), "memory")
	env.setMemory(slot.Memory{Total: plenty.Total, Available: 600 << 20})
	env.requireSlots(t, 1, 1) // a little more is not enough
	env.setMemory(plenty)
	env.requireSlots(t, 3, 3)
	require.Empty(t, env.status().GetOffReason())
}

// noSlots is a runtime on a host that cannot have slots.
type noSlots struct{ *fake.Runtime }

func (noSlots) Unsupported(context.Context) error { return errors.New("the kernel is too old") }

func TestHostWithoutSlots(t *testing.T) {
	env := run(t, 0, -1, func(c *slot.Config) { c.Runtime = noSlots{fake.New(nil)} })
	env.SetRoom(3)
	require.Eventually(t, func() bool { return env.status().GetOffReason() == "the kernel is too old" }, testkit.Timeout, testkit.Tick)
	env.requireSlots(t, 0, 0)
	_, ok := env.Take(image)
	require.False(t, ok)
}

func TestDroppedSlotsAreRemoved(t *testing.T) {
	env := run(t, 0, -1, nil)
	for _, id := range []string{"slot.a", "slot.b", "slot.c"} {
		env.runtime.Put(runtime.Found{ID: id, Task: runtime.TaskRunning}, runtime.Exit{})
	}
	failed := false
	env.runtime.Hook(func(_ context.Context, op fake.Op, id string) error {
		if op == fake.OpDelete && id == "slot.b" && !failed {
			failed = true
			return errors.New("not now")
		}
		return nil
	})
	env.Drop("slot.a", "slot.b", "slot.c")
	require.Eventually(t, func() bool {
		env.clock.Step(time.Second)
		return len(env.runtime.IDs()) == 0
	}, testkit.Timeout, testkit.Tick)
}

func TestReadsMachineMemory(t *testing.T) {
	env := run(t, 0, -1, func(c *slot.Config) { c.Memory = nil })
	env.SetRoom(1)
	env.requireSlots(t, 1, 1)
}
