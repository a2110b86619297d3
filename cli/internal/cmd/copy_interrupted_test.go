package cmd_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"k8s.io/utils/clock"
)

// TestCopyIsInterrupted: nothing of an incomplete file is at its destination, whether the server, the user or the source ends the copy.
func TestCopyIsInterrupted(t *testing.T) {
	big := strings.Repeat("x", 4<<20)
	t.Run("from the sandbox, by the server", func(t *testing.T) {
		b, f := copying(t)
		put(t, filepath.Join(f.root, "srv/file"), big)
		put(t, filepath.Join(f.root, "srv/dir/file"), big)
		put(t, "file", "old")
		f.breakAfter = 7
		for _, source := range []string{"web:/srv/file", "web:/srv/dir/."} {
			r := b.run(t, "cp", source, ".")
			require.Equal(t, 7, r.code, r.err)
			require.Contains(t, r.err, "error: the agent has ended (AGENT_UNAVAILABLE)")
			require.Equal(t, map[string]string{"file": "old"}, tree(t, "."))
		}
	})
	t.Run("from the sandbox, by the user", func(t *testing.T) {
		b, f := copying(t)
		put(t, filepath.Join(f.root, "srv/dir/file"), big)
		ctx, cancel := context.WithCancel(t.Context())
		f.breakAfter, f.broken = 7, cancel
		r := b.runIn(ctx, "cp", "web:/srv/dir", ".")
		require.NotZero(t, r.code)
		for path := range tree(t, ".") {
			require.Equal(t, "dir/", path)
		}
	})
	t.Run("to the sandbox, by the server", func(t *testing.T) {
		b, f := copying(t)
		put(t, "file", big)
		put(t, "dir/file", big)
		f.breakAfter = 3
		for _, source := range []string{"file", "dir"} {
			r := b.run(t, "cp", source, "web:/tmp")
			require.Equal(t, 7, r.code, r.err)
			require.Contains(t, r.err, "AGENT_UNAVAILABLE")
		}
	})
	t.Run("to the sandbox, by the user, while the input is idle", func(t *testing.T) {
		b, f := copying(t)
		ctx, cancel := context.WithCancel(t.Context())
		require.NoError(t, unix.Mkfifo("fifo", 0o600))
		fifo, err := os.OpenFile("fifo", os.O_RDWR, 0)
		require.NoError(t, err)
		_, err = fifo.WriteString("begun")
		require.NoError(t, err)
		f.broken = cancel
		r := b.runIn(ctx, "cp", "fifo", "web:/tmp/")
		require.Equal(t, 130, r.code, r.err)
		require.NoError(t, fifo.Close())
		require.Eventually(t, func() bool { return f.gaveUp() == 1 }, 10*time.Second, time.Millisecond)
		require.Empty(t, f.wrote)
	})
	t.Run("by the source", func(t *testing.T) {
		b, f := copying(t)
		put(t, "file", big)
		f.broken = func() { _ = os.Truncate("file", 10) }
		r := b.run(t, "cp", "file", "web:/tmp/")
		require.Equal(t, 5, r.code, r.err)
		require.Contains(t, r.err, "SOURCE_CHANGED")
		require.Eventually(t, func() bool { return f.gaveUp() == 1 }, 10*time.Second, time.Millisecond)
		require.Empty(t, f.wrote)
	})
}

// TestCopyWarns: special files are left out of the copy of a directory.
func TestCopyWarns(t *testing.T) {
	b, f := copying(t)
	put(t, "dir/file", "one")
	require.NoError(t, unix.Mkfifo("dir/fifo", 0o600))
	r := b.run(t, "cp", "dir", "web:/tmp")
	require.Zero(t, r.code, r.err)
	require.Contains(t, r.err, `"dir/fifo" is not copied`)
	require.Equal(t, "one", tree(t, f.root)["tmp/dir/file"])
}

func TestCopyProgress(t *testing.T) {
	b, f := copying(t)
	b.clock = clock.RealClock{}
	put(t, filepath.Join(f.root, "srv/file"), strings.Repeat("x", 3000))
	f.breakAfter = 2
	f.broken = func() {
		select {
		case <-t.Context().Done():
		case <-time.After(1500 * time.Millisecond):
		}
	}
	r := b.run(t, "cp", "--progress", "web:/srv/file", ".")
	require.Equal(t, 7, r.code)
	require.Regexp(t, `(?m)^copying "web:/srv/file": 2\.0 KiB, 1\.\d KiB/s \.\.\. 1s$`, r.err)
	r = b.run(t, "cp", "web:/srv/file", ".")
	require.Equal(t, 7, r.code)
	require.NotContains(t, r.err, "copying", "no terminal")
}

func TestCopyCompletion(t *testing.T) {
	b, f := copying(t)
	put(t, filepath.Join(f.root, "srv/file"), "one")
	put(t, filepath.Join(f.root, "srv/new\nline"), "one")
	put(t, filepath.Join(f.root, "srv/dir/x"), "deep")
	put(t, filepath.Join(f.root, "home/mine"), "home")
	r := b.run(t, "__complete", "cp", "web:/srv/")
	require.Equal(t, "web:/srv/dir/\nweb:/srv/file\n:4\n", r.out)
	r = b.run(t, "__complete", "cp", "web:/srv/d")
	require.Equal(t, "web:/srv/dir/\n:6\n", r.out)
	r = b.run(t, "__complete", "cp", "web:m")
	require.Equal(t, "web:mine\n:4\n", r.out)
	r = b.run(t, "__complete", "cp", "./x")
	require.Equal(t, ":0\n", r.out)
	r = b.run(t, "__complete", "cp", "a", "web:/x", "")
	require.Equal(t, ":4\n", r.out)
}
