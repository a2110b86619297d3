package strike_test

import (
	"fmt"
	"os"
	"os/exec"
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

// TestSignal kills a process by its program's name, and no other.
func TestSignal(t *testing.T) {
	program := fmt.Sprintf("chaos-victim-of-%d", os.Getpid())
	victim := &exec.Cmd{Path: "/bin/sleep", Args: []string{program, "600"}}
	require.NoError(t, victim.Start())
	// The kernel closes the descriptors that Start waits for before it writes the new program's arguments: for a moment the command line is empty.
	require.Eventually(t, func() bool {
		return slices.Equal([]int{victim.Process.Pid}, strike.Processes(program, ""))
	}, testkit.Timeout, testkit.Tick)
	require.Empty(t, strike.Processes(program, "no such cgroup"))
	_, err := strike.Signal(program, "no such cgroup", syscall.SIGKILL)
	require.ErrorContains(t, err, program)
	_, err = strike.Signal(program, "", syscall.SIGKILL)
	require.NoError(t, err)
	require.ErrorContains(t, victim.Wait(), "killed")
}
