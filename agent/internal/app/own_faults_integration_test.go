//go:build integration

package app_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// shimsOf returns the shims of a containerd.
func shimsOf(s *containerd.Server) (pids []int) {
	for _, shim := range containerd.Shims() {
		if slices.Contains(shim.Args, s.Socket) {
			pids = append(pids, shim.PID)
		}
	}
	return pids
}

// TestOwnShimsDeathIsReported kills a shim with sandboxes and free slots. The agent reports the end of exactly those sandboxes, replaces the
// slots, and creates again.
func TestOwnShimsDeathIsReported(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	const slots = 3
	own := func(c *app.Config) {
		c.RuntimeHandler, c.SlotRoot, c.SandboxInit, c.Shim, c.SlotsMax = "fsb", slotRoot(s), sandboxInit(), shim(), slots
	}
	a := startAgent(t, s, own)
	full := func() bool { return a.snapshot(t).GetSlots().GetFree() == slots }
	kept := record("kept", nil)
	a.mustCreate(t, kept)
	require.Eventually(t, full, testkit.Timeout, testkit.Tick)
	a.stop() // its next process has a shim of its own
	before := shimsOf(s)

	a = startAgent(t, s, own)
	require.Eventually(t, full, testkit.Timeout, testkit.Tick)
	var lost []*agentv1.SandboxRecord
	for i := range 3 {
		r := record(fmt.Sprintf("lost-%d", i), func(s *sandboxv1.SandboxSpec) {
			if i == 2 { // it cannot use a slot
				s.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE
			}
		})
		a.mustCreate(t, r)
		lost = append(lost, r)
	}
	require.Eventually(t, full, testkit.Timeout, testkit.Tick)
	for _, pid := range shimsOf(s) {
		if !slices.Contains(before, pid) {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
	for _, r := range lost {
		got := a.waitState(t, r, agentv1.SandboxState_SANDBOX_STATE_STOPPED)
		require.Equal(t, "RuntimeLost", got.GetReason())
		if got.ExitCode != nil { // otherwise containerd has removed the task
			require.EqualValues(t, 137, got.GetExitCode())
		}
	}
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, a.report(t, kept).GetState())
	require.True(t, a.snapshot(t).GetAccepting())
	next := record("next", nil)
	a.mustCreate(t, next)
	require.Eventually(t, full, testkit.Timeout, testkit.Tick, "the slots are replaced")
	for _, r := range append(lost, kept, next) {
		a.delete(t, r.GetFence(), 0)
	}
	a.stop()
	s.CheckClean(t)
}

// TestOwnAgentWithoutFiles lowers the limit of open files of an agent, so that its creates fail at one step after another.
func TestOwnAgentWithoutFiles(t *testing.T) {
	binary := buildAgent(t)
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a, kill := spawn(t, s, binary, slotFlags(s, "fsb", 0)...)
	pid := agentOf(t, binary)
	warm := record("warm", nil)
	a.mustCreate(t, warm)
	var before unix.Rlimit
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &before))
	failed := 0
	for more, created := uint64(0), false; !created; more++ {
		used, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		require.NoError(t, err)
		require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(used)) + more, Max: before.Max}, nil))
		r := record(fmt.Sprintf("r-%d", more), nil)
		if _, err := a.create(t.Context(), r); err == nil {
			created = true
			a.delete(t, r.GetFence(), 0)
		} else {
			failed++
			require.Contains(t, []fault.Reason{fault.NoCapacity, fault.RuntimeUnavailable}, fault.ReasonOf(err), "%v", err)
		}
	}
	require.Positive(t, failed)
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &before, nil))
	require.Eventually(t, func() bool {
		now := a.snapshot(t)
		return now.GetAccepting() && len(now.GetSandboxes()) == 1
	}, testkit.Timeout, testkit.Tick, "the agent is healthy")
	next := record("next", nil)
	a.mustCreate(t, next)
	a.delete(t, next.GetFence(), 0)
	a.delete(t, warm.GetFence(), 0)
	s.CheckClean(t)
	kill()
}

// agentOf returns the process that executes a binary.
func agentOf(t *testing.T, binary string) int {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/exe")
	require.NoError(t, err)
	for _, link := range links {
		if exe, err := os.Readlink(link); err == nil && exe == binary {
			var pid int
			_, err := fmt.Sscanf(link, "/proc/%d/exe", &pid)
			require.NoError(t, err)
			return pid
		}
	}
	t.Fatalf("no process executes %s", binary)
	return 0
}
