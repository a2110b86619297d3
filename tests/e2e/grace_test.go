//go:build e2e

package e2e_test

import (
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// longExit is how long the process of a test takes after SIGTERM: longer than the default grace period of 10 s.
const longExit = 16 * time.Second

// stubborn starts a sandbox whose process takes longExit after SIGTERM, and returns its name and its process on the node.
func stubborn(t *testing.T, prefix string, args ...string) (name string, pid uint32) {
	t.Helper()
	name = uniqueName(prefix)
	script := fmt.Sprintf("trap 'sleep %d; exit 0' TERM; while true; do sleep 0.2; done", int(longExit.Seconds()))
	cluster.OK(t, "fsb-ctl", append(append([]string{"run", name, "--image", cluster.Busybox}, args...), "--", "sh", "-c", script)...)
	s := customResource(t, name, running)
	t.Cleanup(func() { gone(t, cluster.Namespace, name, s.EffectiveUID()) })
	return name, taskPid(t, s.Status.SandboxID)
}

// exists reports whether a process exists.
func exists(pid uint32) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	return err == nil
}

// ends waits until a process has ended and returns how long that took.
func ends(t *testing.T, pid uint32) time.Duration {
	t.Helper()
	began := time.Now()
	require.True(t, eventually(2*time.Minute, func() bool { return !exists(pid) }), "process %d still exists", pid)
	return time.Since(began)
}

// The grace period of a delete wins over the sandbox's, longer or shorter.
func TestDeleteGrace(t *testing.T) {
	t.Run("longer", func(t *testing.T) {
		t.Parallel()
		name, pid := stubborn(t, "patient")
		cluster.OK(t, "fsb-ctl", "delete", name, "--grace", "60s", "--wait=false")
		took := ends(t, pid)
		require.Greater(t, took, longExit-2*time.Second, "the process was killed before it exited")
		require.Less(t, took, 45*time.Second, "the process exited and its sandbox was not deleted")
	})
	t.Run("shorter", func(t *testing.T) {
		t.Parallel()
		name, pid := stubborn(t, "hurried")
		cluster.OK(t, "fsb-ctl", "delete", name, "--grace", "1s", "--wait=false")
		require.Less(t, ends(t, pid), longExit-4*time.Second, "the process was not killed after the grace period of the delete")
	})
}

// The grace period of a delete survives restarts of every component.
func TestDeleteGraceSurvivesRestarts(t *testing.T) {
	name, pid := stubborn(t, "durable")
	cluster.OK(t, "fsb-ctl", "delete", name, "--grace", "60s", "--wait=false")
	began := time.Now()
	for _, program := range []string{"/allocator", "/controller", "/agent"} {
		kill(t, program)
	}
	took := ends(t, pid) + time.Since(began)
	require.Greater(t, took, longExit-2*time.Second, "the process was killed before it exited")
	require.True(t, eventually(time.Minute, func() bool { return len(readyAgents(t)) > 0 }), "no agent is ready again")
}
