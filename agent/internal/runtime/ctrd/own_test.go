package ctrd_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

func TestCgroupOfTheAgent(t *testing.T) {
	parent := t.TempDir()
	for name, procs := range map[string]string{"fsb-u-1": "42\n", "pause": "41\n", "agent": "40\n42\n", "empty": ""} {
		require.NoError(t, os.Mkdir(filepath.Join(parent, name), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(parent, name, "cgroup.procs"), []byte(procs), 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(parent, "cgroup.procs"), []byte("4\n"), 0o600))
	dir, err := ctrd.CgroupOf(42, parent)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(parent, "agent"), dir)
	_, err = ctrd.CgroupOf(4, parent)
	require.True(t, errdefs.IsNotFound(err), "it is in the Pod's own cgroup: %v", err)
	_, err = ctrd.CgroupOf(4, filepath.Join(parent, "missing"))
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestLowerKeepsALowerLimit(t *testing.T) {
	for before, want := range map[string]int64{"max\n": 512, "9223372036854771712\n": 512, "513\n": 512, "512\n": 512, "100\n": 100} {
		file := filepath.Join(t.TempDir(), "memory.max")
		require.NoError(t, os.WriteFile(file, []byte(before), 0o600))
		got, err := ctrd.Lower(file, 512)
		require.NoError(t, err)
		require.Equal(t, want, got, before)
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		if want == 512 && before != "512\n" {
			require.Equal(t, "512", string(raw))
		} else {
			require.Equal(t, before, string(raw), "not written")
		}
	}
}
