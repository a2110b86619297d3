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
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	patience = 10 * time.Second
	tick     = 2 * time.Millisecond
	image    = "docker.io/library/busybox:1"
	other    = "docker.io/library/python:3"
)

var plenty = slot.Memory{Total: 100 << 30, Available: 50 << 30}

// world is a pool that runs, on a fake runtime and a fake clock.
type world struct {
	*slot.Pool

	runtime *fake.Runtime
	clock   *clocktesting.FakeClock
	stop    func()

	mu     sync.Mutex
	memory slot.Memory
	told   []*agentv1.SlotStatus
}

func run(t *testing.T, minimum, maximum int, change func(*slot.Config)) *world {
	t.Helper()
	w := &world{
		runtime: fake.New(map[string]fake.Image{image: {Local: true}, other: {Local: true}}),
		clock:   clocktesting.NewFakeClock(time.Now()), memory: plenty,
	}
	cfg := slot.Config{
		Runtime: w.runtime, Logs: logs.New(logs.Config{Root: t.TempDir(), Owner: "me"}), AgentUID: "me", AgentPool: "default",
		Min: minimum, Max: maximum, Clock: w.clock,
		Memory: func() (slot.Memory, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.memory, nil
		},
	}
	if change != nil {
		change(&cfg)
	}
	w.Pool = slot.New(cfg)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- w.Run(ctx, func(s *agentv1.SlotStatus) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.told = append(w.told, s)
		})
	}()
	w.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-done)
	})
	t.Cleanup(func() { w.runtime.Hook(nil); w.stop() })
	return w
}

func (w *world) status() *agentv1.SlotStatus {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.told) == 0 {
		return nil
	}
	return w.told[len(w.told)-1]
}

// requireSlots waits for the status.
func (w *world) requireSlots(t *testing.T, free, wanted int32) {
	t.Helper()
	require.Eventually(t, func() bool {
		s := w.status()
		return s.GetFree() == free && s.GetWanted() == wanted
	}, patience, tick, "want %d of %d free, the status is %v", free, wanted, w)
}

func (w *world) setMemory(m slot.Memory) {
	w.mu.Lock()
	w.memory = m
	w.mu.Unlock()
	w.clock.Step(2 * time.Second)
}

func (w *world) String() string { return w.status().String() }

func TestOneSlotForEachFreePlace(t *testing.T) {
	w := run(t, 0, -1, nil)
	w.requireSlots(t, 0, 0)
	w.SetRoom(3)
	w.requireSlots(t, 3, 3)
	require.Len(t, w.runtime.IDs(), 3)
	for _, id := range w.runtime.IDs() {
		f, ok := w.runtime.Found(id)
		require.True(t, ok)
		require.True(t, identity.IsSlotID(id))
		i, err := identity.Parse(f.Labels)
		require.NoError(t, err)
		require.Equal(t, identity.Identity{AgentUID: "me", Pool: "default", State: identity.StateSlot}, i)
	}
	w.SetRoom(1)
	w.requireSlots(t, 1, 1)
	require.Eventually(t, func() bool { return len(w.runtime.IDs()) == 1 }, patience, tick, "what is too much is removed")
	w.stop()
	require.Empty(t, w.runtime.IDs(), "a slot dies with its agent")
}

func TestBounds(t *testing.T) {
	w := run(t, 0, 2, nil)
	w.SetRoom(5)
	w.requireSlots(t, 2, 2)
	off := run(t, 0, 0, nil)
	off.SetRoom(5)
	off.requireSlots(t, 0, 0)
	require.Empty(t, off.status().GetOffReason(), "nobody wants any")
}

func TestATakenSlotIsReplaced(t *testing.T) {
	w := run(t, 0, -1, nil)
	_, ok := w.Take(image)
	require.False(t, ok)
	w.SetRoom(2)
	w.requireSlots(t, 2, 2)
	id, ok := w.Take(image)
	require.True(t, ok)
	w.SetRoom(1)
	w.requireSlots(t, 1, 1)
	require.Contains(t, w.runtime.IDs(), id, "it is its taker's")
	w.SetRoom(2)
	w.requireSlots(t, 2, 2)
	w.Drop(id)
	require.Eventually(t, func() bool { _, there := w.runtime.Found(id); return !there }, patience, tick)
	w.requireSlots(t, 2, 2)
}

func TestCreatesGoFirst(t *testing.T) {
	w := run(t, 0, -1, nil)
	done := w.Begin()
	w.SetRoom(1)
	w.requireSlots(t, 0, 1)
	require.Empty(t, w.runtime.IDs())
	done()
	w.requireSlots(t, 1, 1)
	// But not for ever.
	done = w.Begin()
	defer done()
	w.SetRoom(2)
	w.requireSlots(t, 1, 2)
	require.Eventually(t, func() bool {
		w.clock.Step(time.Second)
		return w.status().GetFree() == 2
	}, patience, tick)
}

// A create takes its place before it takes its slot. The slot is none too many in between.
func TestASlotStaysForTheCreateThatTakesIt(t *testing.T) {
	w := run(t, 0, -1, nil)
	w.SetRoom(2)
	w.requireSlots(t, 2, 2)
	started := w.runtime.IDs()
	done := w.Begin()
	w.SetRoom(1)
	w.requireSlots(t, 2, 1)
	_, ok := w.Take(image)
	require.True(t, ok)
	w.requireSlots(t, 1, 1)
	done()
	require.ElementsMatch(t, started, w.runtime.IDs())
}

// One that takes none after all leaves one too many.
func TestASlotThatNoCreateTakesGoes(t *testing.T) {
	w := run(t, 0, -1, nil)
	w.SetRoom(1)
	w.requireSlots(t, 1, 1)
	done := w.Begin()
	w.SetRoom(0)
	w.requireSlots(t, 1, 0)
	done()
	w.requireSlots(t, 0, 0)
}

func TestWarmSlotsAreTakenForTheirImage(t *testing.T) {
	w := run(t, 0, -1, nil)
	var mu sync.Mutex
	warmed := map[string]int{}
	w.runtime.Hook(func(_ context.Context, op fake.Op, id string) error {
		if op == fake.OpWarm {
			mu.Lock()
			defer mu.Unlock()
			warmed[id]++
		}
		return nil
	})
	for _, i := range []string{image, other, image} {
		_, ok := w.Take(i)
		require.False(t, ok, "but it is remembered")
	}
	w.SetRoom(4)
	require.Eventually(t, func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(warmed) == 4 && w.status().GetFree() == 4
	}, patience, tick)
	for _, n := range warmed {
		require.Equal(t, 1, n)
	}
}

func TestAnImageThatIsGoneIsForgotten(t *testing.T) {
	w := run(t, 0, -1, nil)
	asked := make(chan struct{}, 100)
	w.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpWarm {
			asked <- struct{}{}
		}
		return nil
	})
	_, ok := w.Take("docker.io/library/gone:1")
	require.False(t, ok)
	w.SetRoom(1)
	<-asked
	w.requireSlots(t, 1, 1)
	id, ok := w.Take(image)
	require.True(t, ok)
	require.NotEmpty(t, id)
	require.LessOrEqual(t, len(asked), 1)
}

func TestASlotThatEndsIsReplaced(t *testing.T) {
	w := run(t, 0, -1, nil)
	w.SetRoom(1)
	w.requireSlots(t, 1, 1)
	id := w.runtime.IDs()[0]
	w.runtime.Exit(id, runtime.Exit{Code: 137})
	require.Eventually(t, func() bool {
		w.clock.Step(time.Second)
		ids := w.runtime.IDs()
		return len(ids) == 1 && ids[0] != id && w.status().GetFree() == 1
	}, patience, tick)
}

func TestStartsThatFailAreToldAndTriedAgain(t *testing.T) {
	w := run(t, 0, -1, nil)
	w.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpSlot {
			return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd has a headache")
		}
		return nil
	})
	w.SetRoom(1)
	require.Eventually(t, func() bool {
		w.clock.Step(time.Minute)
		return strings.Contains(w.status().GetOffReason(), "containerd has a headache")
	}, patience, tick)
	w.runtime.Hook(nil)
	require.Eventually(t, func() bool {
		w.clock.Step(time.Minute)
		return w.status().GetFree() == 1 && w.status().GetOffReason() == ""
	}, patience, tick)
	require.Len(t, w.runtime.IDs(), 1, "nothing is left of what failed")
}

func TestSlotsAreGivenUpWhenMemoryIsShort(t *testing.T) {
	w := run(t, 1, -1, nil)
	w.SetRoom(3)
	w.requireSlots(t, 3, 3)
	w.setMemory(slot.Memory{Total: plenty.Total, Available: 1 << 20})
	w.requireSlots(t, 1, 1)
	require.Contains(t, w.status().GetOffReason(), "memory")
	w.setMemory(slot.Memory{Total: plenty.Total, Available: 600 << 20})
	w.requireSlots(t, 1, 1) // a little more is not enough
	w.setMemory(plenty)
	w.requireSlots(t, 3, 3)
	require.Empty(t, w.status().GetOffReason())
}

// noSlots is a runtime on a host that cannot have slots.
type noSlots struct{ *fake.Runtime }

func (noSlots) Unsupported(context.Context) error { return errors.New("the kernel is too old") }

func TestAHostWithoutSlots(t *testing.T) {
	w := run(t, 0, -1, func(c *slot.Config) { c.Runtime = noSlots{fake.New(nil)} })
	w.SetRoom(3)
	require.Eventually(t, func() bool { return w.status().GetOffReason() == "the kernel is too old" }, patience, tick)
	w.requireSlots(t, 0, 0)
	_, ok := w.Take(image)
	require.False(t, ok)
}

func TestWhatAnEarlierLifeLeftIsRemoved(t *testing.T) {
	w := run(t, 0, -1, nil)
	for _, id := range []string{"slot.a", "slot.b", "slot.c"} {
		w.runtime.Put(runtime.Found{ID: id, Task: runtime.TaskRunning}, runtime.Exit{})
	}
	failed := false
	w.runtime.Hook(func(_ context.Context, op fake.Op, id string) error {
		if op == fake.OpDelete && id == "slot.b" && !failed {
			failed = true
			return errors.New("not now")
		}
		return nil
	})
	w.Drop("slot.a", "slot.b", "slot.c")
	require.Eventually(t, func() bool {
		w.clock.Step(time.Second)
		return len(w.runtime.IDs()) == 0
	}, patience, tick)
}

func TestTheMachinesMemoryIsRead(t *testing.T) {
	w := run(t, 0, -1, func(c *slot.Config) { c.Memory = nil })
	w.SetRoom(1)
	w.requireSlots(t, 1, 1)
}
