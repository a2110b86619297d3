//go:build integration

package ctrd_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// remove removes a container as the agent does: again while the runtime asks for that.
func remove(t *testing.T, r *ctrd.Runtime, id string) {
	t.Helper()
	require.Eventually(t, func() bool {
		err := r.Delete(t.Context(), id)
		if err != nil {
			requireTyped(t, err, fault.RuntimeUnavailable)
		}
		return err == nil
	}, testkit.Timeout, testkit.Tick)
}

// fill takes the whole disk that a directory is on, until empty is called.
func fill(t *testing.T, dir string) (empty func()) {
	t.Helper()
	path := filepath.Join(dir, "filler")
	f, err := os.Create(path)
	require.NoError(t, err)
	for size := 1 << 20; size > 0; {
		if _, err := f.Write(make([]byte, size)); err != nil {
			require.ErrorIs(t, err, unix.ENOSPC)
			size /= 2
		}
	}
	return func() {
		require.NoError(t, f.Close())
		require.NoError(t, os.Remove(path))
	}
}

// TestOwnFullDisk fills the disk that images, snapshots and containerd's records are on.
func TestOwnFullDisk(t *testing.T) {
	s := containerd.StartOn(t, 32<<20)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	writer := box(t, s, false, containerd.Busybox, "sh", "-c", "trap 'full=1' USR1; echo ready; while [ -z $full ]; do sleep 0.02; done; dd if=/dev/zero of=/f bs=4k count=1000; echo went on; rm -f /f; exec sleep 1000")
	require.NoError(t, launch(ctx, r, writer))
	slot := box(t, s, true, containerd.Busybox, "sleep", "1000")
	require.NoError(t, startSlot(ctx, r, slot))

	printed := func(text string) func() bool {
		return func() bool {
			out, err := os.ReadFile(writer.LogPath)
			return err == nil && strings.Contains(string(out), text)
		}
	}
	require.Eventually(t, printed("ready"), testkit.Timeout, testkit.Tick)
	empty := fill(t, s.Content)
	claimed := r.Claim(ctx, slot, func(runtime.Stage) {})
	if !errors.Is(claimed, runtime.ErrSlotLost) {
		requireTyped(t, runtime.Shortage(claimed), fault.NoCapacity)
	}
	failed := []string{slot.ID}
	for _, slot := range []bool{false, true, false} {
		b := box(t, s, slot, containerd.Busybox, "sleep", "1000")
		err := launch(ctx, r, b)
		require.Error(t, err)
		if !errors.Is(err, runtime.ErrSlotLost) {
			requireTyped(t, runtime.Shortage(err), fault.NoCapacity)
			require.ErrorContains(t, runtime.Shortage(err), "free disk space")
		}
		failed = append(failed, b.ID)
	}
	require.NoError(t, r.Ping(ctx), "the agent is healthy")
	require.NoError(t, r.Signal(ctx, writer.ID, unix.SIGUSR1, false))
	require.Eventually(t, printed("No space left on device"), testkit.Timeout, testkit.Tick, "a sandbox that writes")
	require.Eventually(t, printed("went on"), testkit.Timeout, testkit.Tick, "it is not ended")
	require.Equal(t, runtime.TaskRunning, states(t, r)[writer.ID])

	empty()
	for _, id := range failed {
		remove(t, r, id)
	}
	for _, id := range append(started(t, s, r, 2), writer.ID) {
		remove(t, r, id)
	}
}

// TestOwnFullCgroupTree lets the kernel make no more cgroups.
func TestOwnFullCgroupTree(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	kept := started(t, s, r, 1)[0]
	more := fullCgroups(t, s.CgroupParent)
	for _, slot := range []bool{false, true} {
		b := box(t, s, slot, containerd.Busybox, "sleep", "1000")
		requireTyped(t, runtime.Shortage(launch(t.Context(), r, b)), fault.NoCapacity)
		left, err := filepath.Glob("/sys/fs/cgroup/*" + s.CgroupParent + "/*" + b.ID + "*")
		require.NoError(t, err)
		require.Empty(t, left)
		remove(t, r, b.ID)
	}
	require.NoError(t, r.Ping(t.Context()), "the agent is healthy")
	require.Equal(t, runtime.TaskRunning, states(t, r)[kept])
	more()
	for _, id := range append(started(t, s, r, 2), kept) {
		remove(t, r, id)
	}
}

// fullCgroups makes a cgroup refuse any below it, with the error of the kernel, until more is called. The unified hierarchy has a limit. The
// legacy ones have that of 65,535 memory cgroups alone, so that a file system without inodes takes its part.
func fullCgroups(t *testing.T, parent string) (more func()) {
	t.Helper()
	if cgroup.Unified() {
		limit := filepath.Join("/sys/fs/cgroup", parent, "cgroup.max.descendants")
		require.NoError(t, os.WriteFile(limit, []byte("1"), 0))
		return func() { require.NoError(t, os.WriteFile(limit, []byte("max"), 0)) }
	}
	dir := filepath.Join("/sys/fs/cgroup/memory", parent)
	require.NoError(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "nr_inodes=1"))
	more = sync.OnceFunc(func() { require.NoError(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	t.Cleanup(more)
	return more
}

// filesOf returns how many files a process has open.
func filesOf(t *testing.T, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
	require.NoError(t, err)
	return len(entries)
}

// TestOwnShimWithoutFiles lowers the limit of open files of a shim, so that each step of a create fails once.
func TestOwnShimWithoutFiles(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	kept := started(t, s, r, 2)
	_, shim := shimOf(t, s, kept[0])
	used := filesOf(t, shim)
	var before unix.Rlimit
	require.NoError(t, unix.Prlimit(shim, unix.RLIMIT_NOFILE, nil, &before))
	failed, created := 0, 0
	for more := 2; created < 2; more += 2 { // the connection of containerd takes one
		require.NoError(t, unix.Prlimit(shim, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(used + more), Max: before.Max}, nil))
		b := box(t, s, more%4 == 0, containerd.Busybox, "sleep", "1000")
		if err := launch(t.Context(), r, b); err == nil {
			created++
		} else {
			failed++
			requireTyped(t, runtime.Shortage(err), fault.NoCapacity)
			require.ErrorContains(t, runtime.Shortage(err), "RLIMIT_NOFILE", "%d", more)
		}
		remove(t, r, b.ID)
	}
	require.Greater(t, failed, 3)
	require.NoError(t, unix.Prlimit(shim, unix.RLIMIT_NOFILE, &before, nil))
	require.Eventually(t, func() bool { return filesOf(t, shim) <= used }, testkit.Timeout, testkit.Tick, "what the failed creates have opened")
	for _, id := range append(started(t, s, r, 2), kept...) {
		require.Equal(t, runtime.TaskRunning, states(t, r)[id])
		remove(t, r, id)
	}
}

// TestOwnImageIsRemovedDuringCreates removes an image, with its layers, again and again while containers are created from it.
func TestOwnImageIsRemovedDuringCreates(t *testing.T) {
	s := containerd.Start(t)
	registry := containerd.NewRegistry(t, "", "", nil)
	ref := registry.Push(t, "app:1", containerd.Image(t))
	r := newRuntime(t, s, mapped(t, s))
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	const workers, each = 3, 6
	var wg sync.WaitGroup
	var mu sync.Mutex
	var refused []error
	for range workers {
		work := make([]runtime.Container, each)
		for i := range work {
			work[i] = box(t, s, i%2 == 1, ref, "true")
		}
		wg.Go(func() {
			for _, c := range work {
				if err := launch(ctx, r, c); err != nil {
					mu.Lock()
					refused = append(refused, err)
					mu.Unlock()
				}
				if err := r.Delete(ctx, c.ID); err != nil {
					t.Errorf("deleting: %v", err)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { defer close(done); wg.Wait() }()
	removed := 0
	for !closed(done) {
		err := s.Client.ImageService().Delete(ctx, ref, images.SynchronousDelete())
		if err == nil {
			removed++
		} else {
			require.True(t, errdefs.IsNotFound(err), "%v", err)
		}
	}
	t.Logf("the image was removed %d times; %d of %d creates were refused", removed, len(refused), workers*each)
	require.Greater(t, removed, 3)
	for _, err := range refused {
		if !errors.Is(err, runtime.ErrSlotLost) { // the cold path would find out
			requireTyped(t, err, fault.ImagePullFailed, fault.ImageNotFound)
		}
	}
	last := box(t, s, false, ref, "true")
	require.NoError(t, launch(ctx, r, last))
	require.NoError(t, r.Delete(ctx, last.ID))
}

// TestMovedTagIsCreatedAsItIsNow moves a tag between creates: each runs the image that its name has now, whatever was presumed.
func TestMovedTagIsCreatedAsItIsNow(t *testing.T) {
	s := containerd.Start(t)
	r := newRuntime(t, s, mapped(t, s))
	const name = "docker.io/library/moves:test"
	create := func(command string) error {
		b := box(t, s, false, "moves:test", command)
		err := launch(t.Context(), r, b)
		require.NoError(t, r.Delete(t.Context(), b.ID))
		return err
	}
	s.Import(t, name, containerd.Image(t, containerd.WithFile("/first", "#!/bin/sh\n", 0o755)))
	require.NoError(t, create("/first"))
	s.Import(t, name, containerd.Image(t, containerd.WithFile("/second", "#!/bin/sh\n", 0o755))) // which the one before does not have
	require.NoError(t, create("/second"))
	s.Import(t, name, containerd.Image(t, containerd.WithUser("missing")))
	require.Equal(t, fault.UserNotFound, fault.ReasonOf(create("true")))
	s.Import(t, name, containerd.Image(t))
	require.NoError(t, create("true"), "not the fault of the image that it had")
	s.Import(t, name, containerd.Image(t, containerd.WithUser("another")))
	other, err := s.Client.ImageService().Get(t.Context(), name)
	require.NoError(t, err)
	require.NoError(t, s.Client.ContentStore().Delete(t.Context(), other.Target.Digest))
	require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(create("true")), "an image without its content is pulled")
	s.Import(t, name, containerd.Image(t))
	require.NoError(t, create("true"))
	require.NoError(t, s.Client.ImageService().Delete(t.Context(), name))
	err = create("true")
	require.NotErrorIs(t, err, runtime.ErrSlotLost)
	require.Equal(t, fault.ImagePullFailed, fault.ReasonOf(err), "%v", err)
}
