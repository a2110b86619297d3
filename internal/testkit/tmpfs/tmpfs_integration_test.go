//go:build integration

package tmpfs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/tmpfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func on(t *testing.T, dir string) bool {
	t.Helper()
	in, err := tmpfs.On(dir)
	require.NoError(t, err)
	return in
}

func TestEnsure(t *testing.T) {
	parent, err := os.MkdirTemp("/var/tmp", "fsb-test-") // a disk
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(parent)) })
	dir := filepath.Join(parent, "state")
	require.NoError(t, tmpfs.Ensure(dir))
	t.Cleanup(func() { require.NoError(t, tmpfs.Release(dir)) })
	require.True(t, on(t, dir))
	require.False(t, on(t, parent))

	kept := filepath.Join(dir, "kept")
	require.NoError(t, os.WriteFile(kept, nil, 0o600))
	require.NoError(t, tmpfs.Ensure(dir))
	require.FileExists(t, kept, "it is not mounted twice")
	require.NoError(t, tmpfs.Release(dir))
	require.False(t, on(t, dir))
	require.NoError(t, tmpfs.Release(dir), "releasing again is success")

	require.NoError(t, os.WriteFile(kept, nil, 0o600))
	require.ErrorIs(t, tmpfs.Ensure(dir), fs.ErrExist, "contents on the disk are never hidden")
	require.FileExists(t, kept)
}
