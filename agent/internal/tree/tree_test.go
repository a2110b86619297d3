package tree_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tree"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const large = 256 << 10

func write(t *testing.T, path string, size int) {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, make([]byte, size), 0o600))
}

// nest makes directories below each other, of which no path can name the last, and a large file in that.
func nest(t *testing.T, dir string, depth int) {
	t.Helper()
	name := strings.Repeat("d", 200)
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	require.NoError(t, err)
	fds := []int{fd}
	for range depth {
		require.NoError(t, unix.Mkdirat(fd, name, 0o700))
		fd, err = unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		require.NoError(t, err)
		fds = append(fds, fd)
	}
	file, err := unix.Openat(fd, "large", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	require.NoError(t, err)
	_, err = unix.Write(file, make([]byte, large))
	require.NoError(t, err)
	require.NoError(t, unix.Close(file))
	t.Cleanup(func() {
		require.NoError(t, unix.Unlinkat(fd, "large", 0))
		for i := len(fds) - 1; i > 0; i-- {
			require.NoError(t, unix.Unlinkat(fds[i-1], name, unix.AT_REMOVEDIR))
		}
		for _, fd := range fds {
			require.NoError(t, unix.Close(fd))
		}
	})
}

// TestMeasure measures trees that a hostile process can make.
func TestMeasure(t *testing.T) {
	const slack = 64 << 10 // directories, which take a block or more
	for name, tt := range map[string]struct {
		make          func(t *testing.T, dir string)
		bytes, inodes int64
	}{
		"nothing": {func(*testing.T, string) {}, 0, 0},
		"files": {func(t *testing.T, dir string) {
			for i := range 100 {
				write(t, filepath.Join(dir, "a", fmt.Sprint(i)), 4096)
			}
			write(t, filepath.Join(dir, "b", "c", "large"), large)
		}, 100*4096 + large, 104},
		"a file with several names counts once": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "0"), large)
			for i := range 3 {
				require.NoError(t, os.Link(filepath.Join(dir, "0"), filepath.Join(dir, fmt.Sprint(i+1))))
			}
		}, large, 4},
		"links lead nowhere": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "a", "large"), large)
			require.NoError(t, os.Symlink("/", filepath.Join(dir, "root")))
			require.NoError(t, os.Symlink(".", filepath.Join(dir, "a", "self")))
			require.NoError(t, unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
		}, large, 5},
		"holes take nothing": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "sparse"), 0)
			require.NoError(t, os.Truncate(filepath.Join(dir, "sparse"), 1<<40))
		}, 0, 1},
		"paths that are too long": {func(t *testing.T, dir string) { nest(t, dir, 100) }, large, 101},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			tt.make(t, dir)
			got, err := tree.Measure(t.Context(), dir, runtime.DiskUsage{})
			require.NoError(t, err)
			require.Equal(t, tt.inodes, got.Inodes)
			require.GreaterOrEqual(t, got.Bytes, tt.bytes)
			require.LessOrEqual(t, got.Bytes, tt.bytes+tt.inodes*4096+slack)
		})
	}
}

// TestTooDeep: a tree that would take all descriptors of this process is refused.
func TestTooDeep(t *testing.T) {
	dir := t.TempDir()
	nest(t, dir, tree.MaxDepth)
	_, err := tree.Measure(t.Context(), dir, runtime.DiskUsage{})
	require.ErrorIs(t, err, tree.ErrTooDeep)
}

// TestStopsAtTheLimit: the time of a measurement is bounded by the limit, however much the sandbox has made.
func TestStopsAtTheLimit(t *testing.T) {
	dir := t.TempDir()
	for i := range 1000 {
		write(t, filepath.Join(dir, fmt.Sprint(i%10), fmt.Sprint(i)), 1)
	}
	got, err := tree.Measure(t.Context(), dir, runtime.DiskUsage{Inodes: 100})
	require.NoError(t, err)
	require.Greater(t, got.Inodes, int64(100))
	require.Less(t, got.Inodes, int64(200))
	got, err = tree.Measure(t.Context(), dir, runtime.DiskUsage{Bytes: 64 << 10})
	require.NoError(t, err)
	require.Greater(t, got.Bytes, int64(64<<10))
	require.Less(t, got.Inodes, int64(300))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = tree.Measure(ctx, dir, runtime.DiskUsage{})
	require.ErrorIs(t, err, context.Canceled)
	_, err = tree.Measure(t.Context(), filepath.Join(dir, "none"), runtime.DiskUsage{})
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestChangesMeanwhile: a sandbox that makes and deletes files all the time cannot make its measurement fail.
func TestChangesMeanwhile(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "stays"), large)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			path := filepath.Join(dir, fmt.Sprintf("churn-%d", worker))
			for ctx.Err() == nil {
				_ = os.MkdirAll(filepath.Join(path, "a", "b"), 0o700)
				for i := range 50 {
					_ = os.WriteFile(filepath.Join(path, "a", "b", fmt.Sprint(i)), nil, 0o600)
				}
				_ = os.Rename(filepath.Join(path, "a"), filepath.Join(path, "c"))
				_ = os.RemoveAll(path)
				_ = os.WriteFile(path, nil, 0o600) // what was a directory is a file
				_ = os.Remove(path)
			}
		})
	}
	defer func() { cancel(); wg.Wait() }()
	for range 200 {
		got, err := tree.Measure(t.Context(), dir, runtime.DiskUsage{})
		require.NoError(t, err)
		require.GreaterOrEqual(t, got.Bytes, int64(large))
	}
}
