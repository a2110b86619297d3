//go:build integration

package cgroup_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	v1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	v2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/typeurl/v2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestLifeOfACgroup makes a cgroup in the host's hierarchies, with a process that starts others, freezes it, and kills it.
func TestLifeOfACgroup(t *testing.T) {
	tree, err := cgroup.Open("/sys/fs/cgroup")
	require.NoError(t, err)
	parent := fmt.Sprintf("/fsb-cgroup-test-%d", os.Getpid())
	path := parent + "/c"
	pids := int64(20)
	t.Cleanup(func() {
		require.NoError(t, tree.Signal(parent, unix.SIGKILL))
		require.NoError(t, tree.Remove(parent))
	})
	require.NoError(t, tree.Create(path, &specs.LinuxResources{Pids: &specs.LinuxPids{Limit: &pids}}))
	into, err := tree.Entrance(path)
	require.NoError(t, err)
	defer into.Close()
	enter := ""
	for i := range into.Tasks {
		enter += fmt.Sprintf("echo 0 >&%d; ", 3+i)
	}
	cmd := exec.CommandContext(t.Context(), "bash", "-c", enter+"sleep 1000 & while :; do :; done")
	cmd.ExtraFiles = into.Tasks
	if into.Dir != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(into.Dir.Fd())}
	}
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	require.Eventually(t, func() bool {
		pids, err := tree.Pids(path)
		return err == nil && len(pids) == 2
	}, testkit.Timeout, testkit.Tick)
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", cmd.Process.Pid))
	require.NoError(t, err)
	require.Contains(t, string(groups), path)

	used := func() uint64 {
		stats, err := tree.Stats(path)
		require.NoError(t, err)
		var one v1.Metrics
		if typeurl.Is(stats, &one) {
			require.NoError(t, typeurl.UnmarshalTo(stats, &one))
			return one.GetCPU().GetUsage().GetTotal()
		}
		var two v2.Metrics
		require.NoError(t, typeurl.UnmarshalTo(stats, &two))
		return two.GetCPU().GetUsageUsec()
	}
	require.NoError(t, tree.Freeze(t.Context(), path, true))
	frozen := used()
	<-time.After(50 * time.Millisecond)
	require.Equal(t, frozen, used(), "it runs although it is frozen")
	require.NoError(t, tree.Freeze(t.Context(), path, false))
	require.Eventually(t, func() bool { return used() > frozen }, testkit.Timeout, testkit.Tick)

	require.NoError(t, tree.Freeze(t.Context(), path, true))
	require.NoError(t, tree.Signal(path, unix.SIGKILL), "although it is frozen")
	require.Error(t, <-ended)
	require.NoError(t, tree.Remove(path))
	require.NoError(t, tree.Remove(path), "a second time")
	left, err := filepath.Glob("/sys/fs/cgroup/*" + path)
	require.NoError(t, err)
	require.Empty(t, left)
	none, err := tree.Pids(path)
	require.NoError(t, err)
	require.Empty(t, none)
}
