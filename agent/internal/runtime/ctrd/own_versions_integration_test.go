//go:build integration

package ctrd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// later makes a configuration that of a later version, whose shim and sandbox-init are other files.
func later(t *testing.T, earlier func(*ctrd.Config)) func(*ctrd.Config) {
	t.Helper()
	dir := t.TempDir()
	next := func(path string) string {
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		to := filepath.Join(dir, filepath.Base(path))
		require.NoError(t, os.WriteFile(to, append(raw, "later"...), 0o755)) // the kernel does not read what follows a program
		return to
	}
	return func(c *ctrd.Config) {
		earlier(c)
		next(filepath.Join(filepath.Dir(c.Shim), shim.Member))
		next(filepath.Join(filepath.Dir(c.SandboxInit), "sandbox-helper"))
		c.Shim, c.SandboxInit = next(c.Shim), next(c.SandboxInit)
	}
}

// TestOwnVersions replaces an agent by one of another version, as an upgrade and as its rollback do: new sandboxes are in a shim of the agent's
// version, and those that run stay in theirs, which the agent handles like its own.
func TestOwnVersions(t *testing.T) {
	for name, upgrade := range map[string]bool{"upgrade": true, "rollback": false} {
		t.Run(name, func(t *testing.T) {
			s := containerd.Start(t)
			s.Import(t, containerd.Busybox, containerd.Image(t))
			from := mapped(t, s)
			to := later(t, from)
			if !upgrade {
				from, to = to, from
			}
			first := newRuntime(t, s, from)
			ids := started(t, s, first, 4)
			first.Close()

			second := newRuntime(t, s, to)
			for _, id := range ids {
				require.Equal(t, runtime.TaskRunning, states(t, second)[id])
			}
			fresh := started(t, s, second, 2)
			oldShim, oldPid := shimOf(t, s, ids[0])
			newShim, newPid := shimOf(t, s, fresh[0])
			require.NotEqual(t, oldShim, newShim)
			require.NotEqual(t, executable(t, oldPid), executable(t, newPid))

			code, stdout, _ := execute(t, s, ids[0], nil, "echo", "in the shim of the other version")
			require.Zero(t, code)
			require.Equal(t, "in the shim of the other version\n", stdout)
			for i, id := range ids {
				if i%2 == 0 {
					require.NoError(t, second.Signal(t.Context(), id, syscall.SIGKILL, false))
					exit, err := second.Wait(t.Context(), id)
					require.NoError(t, err)
					require.EqualValues(t, 137, exit.Code)
				}
				require.NoError(t, second.Delete(t.Context(), id))
			}
			for _, id := range fresh {
				require.Equal(t, runtime.TaskRunning, states(t, second)[id], "the end of the other shim is not theirs")
				require.NoError(t, second.Delete(t.Context(), id))
			}
		})
	}
}

func executable(t *testing.T, pid int) string {
	t.Helper()
	path, err := os.Readlink(filepath.Join("/proc", fmt.Sprint(pid), "exe"))
	require.NoError(t, err)
	return path
}
