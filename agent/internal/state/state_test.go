package state_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestFilesAreWrittenReplacedAndRemoved(t *testing.T) {
	d, err := state.Open(filepath.Join(t.TempDir(), "a", "b"))
	require.NoError(t, err)
	got, err := d.Read("x")
	require.NoError(t, err)
	require.Nil(t, got)
	for _, data := range []string{"one", "", "three"} {
		require.NoError(t, d.Write("x", []byte(data)))
		got, err = d.Read("x")
		require.NoError(t, err)
		require.NotNil(t, got)
		require.Equal(t, data, string(got))
	}
	names, err := d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, names)
	for range 2 {
		require.NoError(t, d.Remove("x"))
	}
	got, err = d.Read("x")
	require.NoError(t, err)
	require.Nil(t, got)
}

func TestOpenRemovesIncompleteFiles(t *testing.T) {
	path := t.TempDir()
	d, err := state.Open(path)
	require.NoError(t, err)
	sub, err := d.Sub("s")
	require.NoError(t, err)
	require.NoError(t, sub.Write("x", []byte("kept")))
	half := filepath.Join(path, "s", ".new-1")
	require.NoError(t, os.WriteFile(half, []byte("ha"), 0o600))
	d, err = state.Open(path)
	require.NoError(t, err)
	names, err := d.Names()
	require.NoError(t, err)
	require.Empty(t, names, "a directory is not a file")
	sub, err = d.Sub("s")
	require.NoError(t, err)
	require.NoFileExists(t, half)
	got, err := sub.Read("x")
	require.NoError(t, err)
	require.Equal(t, "kept", string(got))
}

func TestOnlyPlainNames(t *testing.T) {
	d, err := state.Open(t.TempDir())
	require.NoError(t, err)
	for _, name := range []string{"", ".", "..", "a/b", "../a", ".new-1", "a\x00"} {
		require.ErrorIs(t, d.Write(name, nil), fs.ErrInvalid, name)
		require.ErrorIs(t, d.Remove(name), fs.ErrInvalid, name)
		_, err := d.Read(name)
		require.ErrorIs(t, err, fs.ErrInvalid, name)
		_, err = d.Sub(name)
		require.ErrorIs(t, err, fs.ErrInvalid, name)
	}
}

func TestConcurrentWrites(t *testing.T) {
	d, err := state.Open(t.TempDir())
	require.NoError(t, err)
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() { require.NoError(t, d.Write("x", []byte(fmt.Sprintf("%05d", i)))) })
	}
	wg.Wait()
	got, err := d.Read("x")
	require.NoError(t, err)
	require.Len(t, got, 5)
	names, err := d.Names()
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, names)
}

// TestMissingDirectoryIsAnError stands for every disk error: file modes do not stop root.
func TestMissingDirectoryIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d")
	d, err := state.Open(path)
	require.NoError(t, err)
	require.NoError(t, os.RemoveAll(path))
	require.Error(t, d.Write("x", nil))
	require.Error(t, d.Remove("x"))
	_, err = d.Names()
	require.Error(t, err)
	_, err = state.Open("/dev/null/x")
	require.Error(t, err)
}
