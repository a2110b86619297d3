//go:build integration

package ctrd_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/shim/plan"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// pidOf returns the pid of a container's first process.
func pidOf(t *testing.T, s *containerd.Server, id string) int {
	t.Helper()
	resp, err := s.Client.TaskService().Get(t.Context(), &tasks.GetRequest{ContainerID: id})
	require.NoError(t, err)
	return int(resp.GetProcess().GetPid())
}

// requireTyped requires an error that says what the node lacks, so that the sandbox is created by another agent.
func requireTyped(t *testing.T, err error, reasons ...fault.Reason) {
	t.Helper()
	require.Error(t, err)
	require.Contains(t, reasons, fault.ReasonOf(err), "%v", err)
}

// TestOwnShimsDeathEndsFreeSlots kills a shim of free slots. They end, those of another shim do not, and the next create gets a new shim
// although the slots have not been removed yet.
func TestOwnShimsDeathEndsFreeSlots(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	r.SetShimSize(2)
	slots := make([]runtime.Container, 5)
	for i := range slots {
		slots[i] = box(t, s, true, containerd.Busybox, "sleep", "1000")
		if i < 3 {
			require.NoError(t, startSlot(t.Context(), r, slots[i]))
		}
	}
	_, first := shimOf(t, s, slots[0].ID)
	_, current := shimOf(t, s, slots[2].ID)
	require.NotEqual(t, first, current)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	ends := func(id string) {
		exit, err := r.Wait(ctx, id)
		if err == nil { // otherwise containerd has removed the task
			require.EqualValues(t, 137, exit.Code)
		}
		require.NoError(t, ctx.Err())
	}
	require.NoError(t, syscall.Kill(first, syscall.SIGKILL))
	ends(slots[0].ID)
	ends(slots[1].ID)
	require.ErrorIs(t, r.Claim(ctx, slots[0], func(runtime.Stage) {}), runtime.ErrSlotLost)
	require.NoError(t, r.Claim(ctx, slots[2], func(runtime.Stage) {}))
	require.NoError(t, r.SlotClaimed(slots[2].ID))
	require.Equal(t, runtime.TaskRunning, states(t, r)[slots[2].ID])

	// The one that the next slot would join.
	require.NoError(t, syscall.Kill(current, syscall.SIGKILL))
	ends(slots[2].ID)
	if err := startSlot(ctx, r, slots[3]); err != nil {
		t.Logf("the first start after the death: %v", err)
		requireTyped(t, err, fault.RuntimeUnavailable)
	}
	require.NoError(t, startSlot(ctx, r, slots[4]))
	for _, c := range slots {
		require.NoError(t, r.Delete(ctx, c.ID))
	}
	require.Eventually(t, func() bool {
		left, err := filepath.Glob(filepath.Join(s.Sockets(), "fsb-*"))
		return err == nil && len(left) == 0
	}, testkit.Timeout, testkit.Tick, "sockets")
}

// children returns the processes that a shim has started and that are still sandbox-init.
func children(shim int) (pids []int) {
	lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", shim))
	for _, list := range lists {
		raw, _ := os.ReadFile(list) // it may have ended
		for pid := range strings.FieldsSeq(string(raw)) {
			exe, _ := os.Readlink(filepath.Join("/proc", pid, "exe"))
			if n, err := strconv.Atoi(pid); err == nil && filepath.Base(exe) == filepath.Base(layout.InitPath) {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// TestOwnDeathsDuringCreates kills shims, or their sandbox-inits, while containers are created, from slots and without. A create succeeds or
// says that its shim or its process has ended; a container that was created runs, or its end is reported; and nothing is left of any.
func TestOwnDeathsDuringCreates(t *testing.T) {
	for name, victims := range map[string]func(shim int) []int{
		"shims": func(shim int) []int { return []int{shim} }, "sandbox-inits": children,
	} {
		t.Run(name, func(t *testing.T) { deathsDuringCreates(t, victims) })
	}
}

func deathsDuringCreates(t *testing.T, victims func(shim int) []int) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	r.SetShimSize(4)
	const workers, rounds = 4, 8
	var begun, ended, created, failed, deaths atomic.Int32
	var wg sync.WaitGroup
	for range workers {
		work := make([]runtime.Container, rounds)
		for i := range work {
			work[i] = box(t, s, i%2 == 1, containerd.Busybox, "sleep", "1000")
		}
		wg.Go(func() {
			for _, c := range work {
				begun.Add(1)
				if err := launch(t.Context(), r, c); err == nil {
					created.Add(1)
				} else {
					failed.Add(1)
					if !errors.Is(err, runtime.ErrSlotLost) && fault.ReasonOf(err) != fault.RuntimeUnavailable {
						t.Errorf("not typed: %v", err)
					}
				}
				ended.Add(1)
				for err := r.Delete(t.Context(), c.ID); err != nil; err = r.Delete(t.Context(), c.ID) { // as the agent does
					if fault.ReasonOf(err) != fault.RuntimeUnavailable {
						t.Errorf("deleting: %v", err)
						return
					}
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { defer close(done); wg.Wait() }()
	for strike := int32(workers); strike < workers*rounds; strike += 2 * workers { // in between, creates succeed
		for before := deaths.Load(); deaths.Load() == before && !closed(done); {
			if begun.Load() >= strike && ended.Load() < begun.Load() {
				deaths.Add(killThose(s, victims))
			}
		}
	}
	<-done
	t.Logf("%d deaths, %d creates succeeded, %d failed", deaths.Load(), created.Load(), failed.Load())
	require.Positive(t, deaths.Load())
	require.Positive(t, failed.Load())
	last := started(t, s, r, 2)
	for _, id := range last {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}

// killThose kills the victims of all shims of a containerd, and returns how many there were.
func killThose(s *containerd.Server, victims func(shim int) []int) (n int32) {
	for _, shim := range containerd.Shims() {
		if !slices.Contains(shim.Args, s.Socket) || slices.Contains(shim.Args, "start") || slices.Contains(shim.Args, "delete") {
			continue // what containerd waits for
		}
		for _, pid := range victims(shim.PID) {
			if syscall.Kill(pid, syscall.SIGKILL) == nil {
				n++
			}
		}
	}
	return n
}

func closed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

// TestOwnInitsDeath kills sandbox-init at each of its steps.
func TestOwnInitsDeath(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	kept := started(t, s, r, 1)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	none := func(runtime.Stage) {}
	kill := func(id string) {
		require.NoError(t, syscall.Kill(pidOf(t, s, id), syscall.SIGKILL))
		exit, err := r.Wait(ctx, id)
		require.NoError(t, err)
		require.EqualValues(t, 137, exit.Code)
		require.Equal(t, runtime.TaskStopped, states(t, r)[id])
	}
	slot := box(t, s, true, containerd.Busybox, "sleep", "1000")
	require.NoError(t, startSlot(ctx, r, slot))
	kill(slot.ID)
	requireTyped(t, r.Connect(ctx, slot.ID, filepath.Join(t.TempDir(), "never")), fault.RuntimeUnavailable) // before it listens
	require.ErrorIs(t, r.Claim(ctx, slot, none), runtime.ErrSlotLost, "before its claim")

	cold := box(t, s, false, containerd.Busybox, "sleep", "1000")
	require.NoError(t, r.Create(ctx, cold, none))
	kill(cold.ID)
	err := r.Start(ctx, cold.ID)
	requireTyped(t, err, fault.RuntimeUnavailable)
	require.ErrorContains(t, err, "ended before its command was executed", "between its claim and its start")

	claimed := started(t, s, r, 2)
	for _, id := range claimed {
		kill(id)
	}
	require.Equal(t, runtime.TaskRunning, states(t, r)[kept[0]], "its neighbor")
	for _, id := range append([]string{slot.ID, cold.ID}, append(kept, claimed...)...) {
		require.NoError(t, r.Delete(ctx, id))
	}
}

// TestOwnUnusedShimEnds starts a shim as containerd does, and never creates its anchor: containerd was killed, or has given the start up.
func TestOwnUnusedShimEnds(t *testing.T) {
	s := containerd.Start(t)
	cfg := ctrd.Config{}
	own(t, s)(&cfg)
	bundle := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(bundle, "config.json"), []byte(`{"ociVersion":"1.2.0","annotations":{"`+plan.AnchorAnnotation+`":"true"}}`), 0o600))
	id := identity.ShimID(strings.Repeat("a", 20))
	cmd := exec.CommandContext(t.Context(), cfg.Shim, "-namespace", "k8s.io", "-id", id, "-address", s.Socket, "start")
	cmd.Dir = bundle
	cmd.Env = []string{"TTRPC_ADDRESS=" + s.Socket + ".ttrpc"}
	out, err := cmd.Output()
	require.NoError(t, err)
	var answer struct{ Address string }
	require.NoError(t, json.Unmarshal(out, &answer))
	socket := strings.TrimPrefix(answer.Address, "unix://")
	require.FileExists(t, socket)
	require.Eventually(t, func() bool {
		_, err := os.Stat(socket)
		return errors.Is(err, os.ErrNotExist)
	}, testkit.Timeout, testkit.Tick)
}
