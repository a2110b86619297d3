//go:build integration

package containerd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestHeldIsFound: a leak check that finds nothing is worth nothing.
func TestHeldIsFound(t *testing.T) {
	before := containerd.Held()
	tree, err := unix.OpenTree(unix.AT_FDCWD, t.TempDir(), unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	require.NoError(t, err)
	space, err := unix.Open("/proc/self/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	moved, done := make(chan error), make(chan struct{})
	var move func()
	move = func() {
		runtime.LockOSThread() // the thread ends with this function
		if unix.Gettid() == os.Getpid() {
			defer runtime.UnlockOSThread() // the first one does not end
			go move()
		} else {
			moved <- unix.Unshare(unix.CLONE_NEWNET)
		}
		<-done
	}
	go move()
	require.NoError(t, <-moved)
	require.Len(t, containerd.Held(), len(before)+3)
	close(done)
	require.NoError(t, unix.Close(tree))
	require.NoError(t, unix.Close(space))
}

// TestProcessesAreFound starts what a shim that was killed could leave: sandbox-init in no cgroup, and another program in one.
func TestProcessesAreFound(t *testing.T) {
	s := containerd.Start(t)
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	binary, err := os.ReadFile(sleep)
	require.NoError(t, err)
	installed := filepath.Join(s.Dir, "slots", "v", "sandbox-init")
	require.NoError(t, os.MkdirAll(filepath.Dir(installed), 0o700))
	require.NoError(t, os.WriteFile(installed, binary, 0o700))
	group := filepath.Join("/sys/fs/cgroup/cpu", s.CgroupParent)
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		group = filepath.Join("/sys/fs/cgroup", s.CgroupParent)
	}
	require.NoError(t, os.Mkdir(group, 0o755))
	for _, program := range []string{installed, sleep} {
		require.Empty(t, s.Processes())
		cmd := exec.CommandContext(t.Context(), program, "1000")
		require.NoError(t, cmd.Start())
		if program == sleep {
			require.NoError(t, os.WriteFile(filepath.Join(group, "cgroup.procs"), fmt.Append(nil, cmd.Process.Pid), 0))
		}
		require.Len(t, s.Processes(), 1)
		require.NoError(t, cmd.Process.Kill())
		require.Error(t, cmd.Wait())
	}
}
