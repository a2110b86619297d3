//go:build e2e

package e2e_test

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// pidsOf returns the processes of the mesh by the path of the program, inside their image, that the kernel executes. A sandbox, which is
// in a cgroup of its own, is none of them, whatever it executes.
func pidsOf(t *testing.T, program string) []int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	require.NoError(t, err)
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		groups, groupsErr := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if err == nil && groupsErr == nil && strings.TrimSuffix(exe, " (deleted)") == program && !inSandbox(string(groups)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// inSandbox reports whether one of a process's cgroups, as /proc/PID/cgroup lists them, is a sandbox's.
func inSandbox(groups string) bool {
	for line := range strings.Lines(groups) {
		if strings.HasPrefix(filepath.Base(strings.TrimSpace(line)), ctrd.CgroupPrefix) {
			return true
		}
	}
	return false
}

// kill kills all processes of a program. Among them may be a probe of the kubelet, which ends by itself.
func kill(t *testing.T, program string) {
	t.Helper()
	old := pidsOf(t, program)
	require.NotEmpty(t, old, "no process %s", program)
	for _, pid := range old {
		if err := syscall.Kill(pid, syscall.SIGKILL); !errors.Is(err, syscall.ESRCH) {
			require.NoError(t, err)
		}
	}
}

// taskPid is the pid of a sandbox's process on the host.
func taskPid(t *testing.T, containerID string) uint32 {
	t.Helper()
	ctx := nodeContext(t.Context())
	container, err := nodeClient(t).LoadContainer(ctx, containerID)
	require.NoError(t, err)
	task, err := container.Task(ctx, nil)
	require.NoError(t, err)
	return task.Pid()
}

// TestSandboxesSurviveAgentRestart kills the agents; their sandboxes keep running and logging, and are managed again.
func TestSandboxesSurviveAgentRestart(t *testing.T) {
	c := sandboxes(t)
	req := sleeper(uniqueName("survivor"))
	req.Spec.Command = []string{"sh", "-c", "i=0; while true; do i=$((i+1)); echo line $i; sleep 0.1; done"}
	resp := create(t, c, req)
	id := resp.GetSandbox().GetStatus().GetSandboxId()
	before := taskPid(t, id)
	kill(t, "/agent")
	require.True(t, eventually(time.Minute, func() bool { return len(readyAgents(t)) > 0 }), "no agent is ready again")
	require.Equal(t, before, taskPid(t, id), "the process was restarted")
	var lines []string
	require.True(t, eventually(settle, func() bool {
		r := cluster.Run(t, "", "fsb-ctl", "logs", req.GetName())
		lines = strings.Split(strings.TrimSpace(r.Stdout), "\n")
		return r.Code == 0 && len(lines) > 20
	}))
	for i, line := range lines {
		require.Equal(t, "line "+itoa(i+1), line, "the log has a gap")
	}
}

// TestAllocatorRestartLosesNothing kills the allocators right after they acknowledged creates.
func TestAllocatorRestartLosesNothing(t *testing.T) {
	c := sandboxes(t)
	var acknowledged []*sandboxv1.Sandbox
	for range 5 {
		acknowledged = append(acknowledged, create(t, c, sleeper(uniqueName("kept"))).GetSandbox())
	}
	kill(t, "/allocator")
	require.True(t, eventually(time.Minute, func() bool {
		_, err := c.GetSandbox(t.Context(), &sandboxv1.GetSandboxRequest{Namespace: acknowledged[0].GetNamespace(), Name: acknowledged[0].GetName()})
		return err == nil
	}), "no allocator answers again")
	for _, s := range acknowledged {
		cr := customResource(t, s.GetName(), running)
		require.Equal(t, s.GetUid(), cr.EffectiveUID())
	}
}
