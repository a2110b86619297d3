package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
)

// leakTimeout is the time that containerd's garbage collector and the kernel have to finish.
const leakTimeout = 15 * time.Second

// Leaks returns everything that exists besides images and their layers: tasks, containers, records of shims, leases, snapshots, log directories,
// cgroups, ranges of user ids.
func (s *Server) Leaks(ctx context.Context) ([]string, error) {
	var left []string
	list, err := s.Client.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		return nil, err
	}
	for _, t := range list.GetTasks() {
		left = append(left, "task "+t.GetID()+" "+t.GetStatus().String())
	}
	containers, err := s.Client.ContainerService().List(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range containers {
		left = append(left, "container "+c.ID)
	}
	err = s.Client.SnapshotService(ctrd.DefaultSnapshotter).Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			left = append(left, "snapshot "+info.Name)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	logs, err := os.ReadDir(s.LogRoot)
	if err != nil {
		return nil, err
	}
	for _, l := range logs {
		left = append(left, "log directory "+l.Name())
	}
	records, err := s.Client.SandboxStore().List(ctx)
	if err != nil {
		return nil, err
	}
	for _, r := range records {
		left = append(left, "record of shim "+r.ID)
	}
	leases, err := s.Client.LeasesService().List(ctx)
	if err != nil {
		return nil, err
	}
	for _, l := range leases {
		if _, expires := l.Labels["containerd.io/gc.expire"]; expires {
			continue // containerd removes it itself; who took it may have been killed
		}
		left = append(left, "lease "+l.ID)
	}
	held, err := s.Ranges(1).List()
	if err != nil {
		return nil, err
	}
	for _, h := range held {
		left = append(left, "user ids of "+h.ID)
	}
	for _, dir := range cgroupDirs(s.CgroupParent) {
		children, _ := os.ReadDir(dir)
		for _, c := range children {
			if c.IsDir() && c.Name() != ctrd.ShimCgroup { // it stays as long as the Pod
				left = append(left, "cgroup "+filepath.Join(dir, c.Name()))
			}
		}
	}
	return left, nil
}

// Ranges returns ranges of user ids for containers of this server.
func (s *Server) Ranges(count int) idrange.Ranges {
	return idrange.Ranges{Dir: idrange.Dir(filepath.Join(s.Dir, "slots")), First: idrange.DefaultFirst, Count: count}
}

// CheckClean fails the test unless nothing is left within 15 s.
func (s *Server) CheckClean(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), leakTimeout)
	defer cancel()
	var left []string
	err := poll(ctx, func() error {
		now, err := s.Leaks(ctx)
		if err != nil {
			return err
		}
		if left = now; len(left) > 0 {
			return errors.New("not clean")
		}
		return nil
	})
	if err != nil {
		t.Errorf("containerd is not clean: %v; left: %s", err, strings.Join(left, "; "))
	}
}

// sweep removes every container, so that a failed test leaves nothing on the machine.
func (s *Server) sweep(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*leakTimeout)
	defer cancel()
	containers, err := s.Client.ContainerService().List(ctx)
	require.NoError(t, err)
	r := &ctrd.Remover{Client: s.Client, Snapshotter: ctrd.DefaultSnapshotter, LogRoot: s.LogRoot, Ranges: s.Ranges(1), ProcRoot: "/proc", CgroupRoot: "/sys/fs/cgroup"}
	for _, c := range containers {
		if err := r.Remove(ctx, c.ID); err != nil {
			t.Errorf("sweeping container %s: %v", c.ID, err)
		}
	}
}

// leftovers returns the processes and mounts of this server that are left after its end, and what this process still holds that it did not hold
// at the start. It kills the processes.
func (s *Server) leftovers() []string {
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	var left []string
	_ = poll(ctx, func() error {
		mounts := slices.DeleteFunc(mountsBelow(s.Dir), func(m string) bool { return m == "mount "+s.state() })
		kept := slices.DeleteFunc(held(), func(h string) bool { return slices.Contains(s.before, h) })
		left = slices.Concat(s.processes(), mounts, kept)
		if len(left) > 0 {
			return fmt.Errorf("%d left", len(left))
		}
		return nil
	})
	for _, p := range left {
		if pid, ok := strings.CutPrefix(p, "process "); ok {
			pid, _, _ = strings.Cut(pid, " ")
			if n, err := strconv.Atoi(pid); err == nil {
				_ = syscall.Kill(n, syscall.SIGKILL)
			}
		}
	}
	for _, dir := range cgroupDirs(s.CgroupParent) {
		_ = filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return nil //nolint:nilerr // it was removed meanwhile
			}
			for _, pid := range lines(filepath.Join(path, "cgroup.procs")) {
				if n, err := strconv.Atoi(pid); err == nil && n > 1 {
					_ = syscall.Kill(n, syscall.SIGKILL)
				}
			}
			return nil
		})
	}
	return left
}

// processes of this server are shims that have its directory among their arguments, those that have its bundle as working directory, those in its
// cgroups, and each sandbox-init that was installed for it, wherever it is.
func (s *Server) processes() []string {
	entries, _ := os.ReadDir("/proc")
	var out []string
	ours, inits := map[int]bool{}, s.inits()
	for _, shim := range Shims() {
		ours[shim.PID] = strings.Contains(strings.Join(shim.Args, " "), s.Dir)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		cwd, _ := os.Readlink(filepath.Join("/proc", e.Name(), "cwd"))
		if ours[pid] || strings.HasPrefix(cwd, s.Dir) || inCgroup(e.Name(), s.CgroupParent) || executes(e.Name(), inits) {
			exe, _ := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
			out = append(out, "process "+e.Name()+" "+exe)
		}
	}
	return out
}

func mountsBelow(dir string) []string {
	var out []string
	for _, l := range lines("/proc/self/mountinfo") {
		if f := strings.Fields(l); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			out = append(out, "mount "+f[4])
		}
	}
	return out
}

func unmountBelow(dir string) {
	mounts := mountsBelow(dir)
	slices.Reverse(mounts)
	for _, m := range mounts {
		_ = syscall.Unmount(strings.TrimPrefix(m, "mount "), syscall.MNT_DETACH)
	}
}

func cgroupDirs(path string) []string {
	dirs := []string{filepath.Join("/sys/fs/cgroup", path)}
	entries, _ := os.ReadDir("/sys/fs/cgroup")
	for _, e := range entries {
		if e.IsDir() {
			dirs = append(dirs, filepath.Join("/sys/fs/cgroup", e.Name(), path))
		}
	}
	return slices.DeleteFunc(dirs, func(d string) bool { _, err := os.Stat(d); return err != nil })
}

// RemoveCgroup removes a cgroup that stands for a Pod's, below CgroupParent, as the kubelet does when the Pod is gone.
func (s *Server) RemoveCgroup(name string) { removeCgroups(filepath.Join(s.CgroupParent, name)) }

func removeCgroups(path string) {
	for _, dir := range cgroupDirs(path) {
		_ = syscall.Rmdir(filepath.Join(dir, ctrd.ShimCgroup))
		_ = syscall.Rmdir(dir)
	}
}
