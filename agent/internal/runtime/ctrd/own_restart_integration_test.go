//go:build integration

package ctrd_test

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestOwnContainerdsDeathDuringCreates kills containerd while containers are created, from slots and without. Those that run, run on: their
// logs grow without containerd, and after its next start processes are added to them, and free slots are claimed. A create that met the death
// says so, and nothing of it is left.
func TestOwnContainerdsDeathDuringCreates(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	r.SetShimSize(5)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	writer := box(t, s, true, containerd.Busybox, "sh", "-c", "while sleep 0.01; do echo line; done")
	require.NoError(t, launch(ctx, r, writer))
	slot := box(t, s, true, containerd.Busybox, "sleep", "1000")
	require.NoError(t, startSlot(ctx, r, slot))
	require.NoError(t, r.WarmSlot(ctx, slot.ID, containerd.Busybox))
	added, err := addProcess(t, s, writer.ID, nil, nil, "sleep", "1000")
	require.NoError(t, err)
	require.NoError(t, added.Start(ctx))

	const workers = 4
	var begun atomic.Int32
	var wg sync.WaitGroup
	var mu sync.Mutex
	var ids []string
	var failed []error
	for range workers {
		work := make([]runtime.Container, 8)
		for i := range work {
			work[i] = box(t, s, i%2 == 1, containerd.Busybox, "sleep", "1000")
			ids = append(ids, work[i].ID)
		}
		wg.Go(func() {
			for _, c := range work {
				begun.Add(1)
				if err := launch(ctx, r, c); err != nil {
					mu.Lock()
					failed = append(failed, err)
					mu.Unlock()
					return
				}
			}
		})
	}
	require.Eventually(t, func() bool { return begun.Load() >= 2*workers+1 }, testkit.Timeout, testkit.Tick)
	s.Kill(t)
	wg.Wait()
	require.Len(t, failed, workers)
	for _, err := range failed {
		requireTyped(t, err, fault.RuntimeUnavailable)
	}
	size := func() int64 {
		info, err := os.Stat(writer.LogPath)
		require.NoError(t, err)
		return info.Size()
	}
	before := size()
	require.Eventually(t, func() bool { return size() > before }, testkit.Timeout, testkit.Tick, "without containerd")
	s.Up(t)

	before = size()
	require.Eventually(t, func() bool { return size() > before }, testkit.Timeout, testkit.Tick)
	require.Equal(t, runtime.TaskRunning, states(t, r)[writer.ID])
	code, stdout, _ := execute(t, s, writer.ID, nil, "echo", "added")
	require.EqualValues(t, 0, code)
	require.Equal(t, "added\n", stdout)
	require.NoError(t, added.Kill(ctx, unix.SIGKILL))
	require.NoError(t, r.Claim(ctx, slot, func(runtime.Stage) {}))
	require.NoError(t, r.SlotClaimed(slot.ID))
	for _, id := range append(ids, writer.ID, slot.ID) {
		remove(t, r, id)
	}
	// containerd may have left a directory where its next snapshot is to be. It removes that with those that were deleted.
	last := box(t, s, false, containerd.Busybox, "sleep", "1000")
	require.Eventually(t, func() bool {
		err := launch(ctx, r, last)
		if err != nil {
			requireTyped(t, err, fault.RuntimeUnavailable)
			require.NoError(t, r.Delete(ctx, last.ID))
			last = box(t, s, false, containerd.Busybox, "sleep", "1000")
		}
		return err == nil
	}, testkit.Timeout, testkit.Tick)
	remove(t, r, last.ID)
}

// TestOwnShimIsKnownAgain removes the record of a shim, as containerd's CRI plugin does when it starts. Containers join the shim as before.
func TestOwnShimIsKnownAgain(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	ids := started(t, s, r, 2)
	anchor, _ := shimOf(t, s, ids[0])
	for range 2 {
		require.NoError(t, s.Client.SandboxStore().Delete(t.Context(), anchor))
		more := started(t, s, r, 2)
		for _, id := range more {
			other, _ := shimOf(t, s, id)
			require.Equal(t, anchor, other)
		}
		ids = append(ids, more...)
	}
	for _, id := range ids {
		require.NoError(t, r.Delete(t.Context(), id))
	}
}
