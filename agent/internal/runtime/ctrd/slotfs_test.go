package ctrd_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

func prepare(t *testing.T, dir string) {
	t.Helper()
	root, err := os.Open(dir)
	require.NoError(t, err)
	defer root.Close()
	ctrd.PrepareMountpoints(root, os.Geteuid())
}

func TestPrepareMountpointsCreatesMissing(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "etc"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "etc/hosts"), []byte("the image's"), 0o600))
	prepare(t, dir)
	for _, name := range []string{"proc", "dev", "sys", "etc/hostname", "etc/resolv.conf"} {
		_, err := os.Lstat(filepath.Join(dir, name))
		require.NoError(t, err)
	}
	hosts, err := os.ReadFile(filepath.Join(dir, "etc/hosts"))
	require.NoError(t, err)
	require.Equal(t, "the image's", string(hosts))
}

// TestPrepareMountpointsStaysInRoot uses an image with symbolic links out of its root.
func TestPrepareMountpointsStaysInRoot(t *testing.T) {
	dir, outside := t.TempDir(), t.TempDir()
	require.NoError(t, os.Symlink(outside, filepath.Join(dir, "etc")))
	require.NoError(t, os.Symlink(filepath.Join(outside, "made"), filepath.Join(dir, "proc")))
	prepare(t, dir)
	made, err := os.ReadDir(outside)
	require.NoError(t, err)
	require.Empty(t, made)
}
