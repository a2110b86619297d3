package strike_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/plan"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/strike"
)

func TestEveryKindIsImplemented(t *testing.T) {
	for _, k := range plan.Kinds() {
		require.True(t, strike.Has(k), "%s", k)
	}
}

func TestPodOfLeaseHolder(t *testing.T) {
	require.Equal(t, "allocator-5d-x2", strike.PodOf("allocator-5d-x2_10.0.0.1:9090_0b9c"))
	require.Equal(t, "controller-1", strike.PodOf("controller-1_0b9c"))
	require.Empty(t, strike.PodOf(""))
}

// TestSignal kills a process by its program, and no other: not one that only calls itself so, nor a sandbox.
func TestSignal(t *testing.T) {
	program := fmt.Sprintf("chaos-victim-of-%d", os.Getpid())
	path := filepath.Join(t.TempDir(), program)
	raw, err := os.ReadFile("/bin/sleep")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, raw, 0o700))
	namesake := start(t, &exec.Cmd{Path: "/bin/sleep", Args: []string{path, "600"}})
	victim := start(t, &exec.Cmd{Path: path, Args: []string{"sleep", "600"}})
	for _, name := range []string{program, path} {
		require.Equal(t, []int{victim}, strike.Processes(name, ""))
	}
	require.NoError(t, os.Remove(path))
	require.Equal(t, []int{victim}, strike.Processes(program, ""), "a program that was replaced")
	require.Empty(t, strike.Processes(program, "no such cgroup"))
	_, err = strike.Signal(program, "no such cgroup", syscall.SIGKILL)
	require.ErrorContains(t, err, program)
	_, err = strike.Signal(program, "", syscall.SIGKILL)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return len(strike.Processes(program, "")) == 0 }, testkit.Timeout, testkit.Tick)
	require.NoError(t, syscall.Kill(namesake, 0))
}

// A program of the node is recognized among those that are one file by its first argument.
func TestProgramsInOneFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fsb-local")
	raw, err := os.ReadFile("/bin/sleep")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(path, raw, 0o700))
	program := fmt.Sprintf("component-of-%d", os.Getpid())
	pid := start(t, &exec.Cmd{Path: path, Args: []string{program, "600"}})
	start(t, &exec.Cmd{Path: path, Args: []string{"another", "600"}})
	start(t, &exec.Cmd{Path: "/bin/sleep", Args: []string{program, "600"}})
	require.Eventually(t, func() bool { return slices.Equal([]int{pid}, strike.Processes(program, "")) }, testkit.Timeout, testkit.Tick)
}

// A sandbox runs in the cgroup of its agent's Pod, and may have any program.
func TestSandboxIsNotAComponent(t *testing.T) {
	cgroup := "/sys/fs/cgroup"
	if entries, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs"); err == nil && len(entries) > 0 {
		if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err != nil {
			cgroup = filepath.Dir(entries[0])
		}
	}
	pod := filepath.Join(cgroup, fmt.Sprintf("chaos-pod-%d", os.Getpid()))
	sandbox := filepath.Join(pod, "fsb-u-1")
	require.NoError(t, os.MkdirAll(sandbox, 0o700), "cgroups need root: run these tests as root")
	agent := start(t, &exec.Cmd{Path: "/bin/sleep", Args: []string{"/bin/sleep", "600"}})
	hostile := start(t, &exec.Cmd{Path: "/bin/sleep", Args: []string{"/bin/sleep", "600"}})
	t.Cleanup(func() {
		for _, dir := range []string{sandbox, pod} {
			require.Eventually(t, func() bool { return os.Remove(dir) == nil }, testkit.Timeout, testkit.Tick)
		}
	})
	t.Cleanup(func() { kill(t, agent); kill(t, hostile) })
	for dir, pid := range map[string]int{pod: agent, sandbox: hostile} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0o600))
	}
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", agent))
	require.NoError(t, err)
	require.Equal(t, []int{agent}, strike.Processes(exe, filepath.Base(pod)))
}

// start starts a process, which executes its program when start returns. Its command line may still be empty.
func start(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() { kill(t, cmd.Process.Pid); _ = <-ended })
	return cmd.Process.Pid
}

// kill kills a process, which may have ended.
func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		require.ErrorIs(t, err, syscall.ESRCH)
	}
}
