package logs_test

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// follower follows a log until its test ends, or stop is called.
type follower struct {
	mu   sync.Mutex
	out  bytes.Buffer
	done chan error
	stop context.CancelFunc
}

func (s *store) follow(t *testing.T, id string) *follower {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	f := &follower{done: make(chan error, 1), stop: cancel}
	go func() {
		f.done <- s.Read(ctx, id, logs.Options{Tail: -1, Follow: true}, make(chan struct{}), func(p []byte) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.out.Write(p)
			return nil
		})
	}()
	t.Cleanup(cancel)
	return f
}

func (f *follower) text() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out.String()
}

// instances returns the number of inotify instances that this process has open.
func instances(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		if target, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && target == "anon_inode:inotify" {
			n++
		}
	}
	return n
}

// TestFollowersShareOneInstance: with an instance for each, the 129th follower on a node failed, and so did the kubelet.
func TestFollowersShareOneInstance(t *testing.T) {
	const each = 100
	s := newStore(t, 1<<20)
	s.write(t, "first\n")
	paths, err := s.Create("u-2", "host")
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(paths.Output, []byte("first\n"), 0o600))
	var all []*follower
	for range each {
		all = append(all, s.follow(t, "u-1"), s.follow(t, "u-2"))
	}
	have := func(want string) {
		t.Helper()
		require.Eventually(t, func() bool {
			for _, f := range all {
				if f.text() != want {
					return false
				}
			}
			return true
		}, testkit.Timeout, testkit.Tick)
	}
	have("first\n")
	require.Equal(t, 1, instances(t))
	two, err := os.OpenFile(paths.Output, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer two.Close()
	s.write(t, "second\n")
	_, err = two.WriteString("second\n")
	require.NoError(t, err)
	have("first\nsecond\n") // the clock stands still: by events alone

	// Those of one log leave; the others are not affected.
	left := all[:0]
	for i, f := range all {
		if i%2 == 0 && i > 0 {
			f.stop()
			require.ErrorIs(t, <-f.done, context.Canceled)
			continue
		}
		left = append(left, f)
	}
	all = left
	s.write(t, "third\n")
	_, err = two.WriteString("third\n")
	require.NoError(t, err)
	have("first\nsecond\nthird\n")
	for _, f := range all {
		f.stop()
		require.ErrorIs(t, <-f.done, context.Canceled)
	}
	require.Zero(t, instances(t))
}

// TestFollowWithoutInotify: a sandbox that runs as root shares root's instances, and can take them all.
func TestFollowWithoutInotify(t *testing.T) {
	s := newStore(t, 1<<20)
	s.WithoutNotify()
	f := s.follow(t, "u-1")
	s.write(t, "late\n")
	require.Eventually(t, func() bool {
		s.clock.Step(time.Second)
		return f.text() == "late\n"
	}, testkit.Timeout, testkit.Tick)
	f.stop()
	require.ErrorIs(t, <-f.done, context.Canceled)
}

// TestFollowOfAReplacedLog: a log of the same name is another file, which another follower watches at the same time.
func TestFollowOfAReplacedLog(t *testing.T) {
	s := newStore(t, 1<<20)
	old := s.follow(t, "u-1")
	s.write(t, "old\n")
	require.Eventually(t, func() bool { return old.text() == "old\n" }, testkit.Timeout, testkit.Tick)
	paths, err := s.Create("u-1", "host")
	require.NoError(t, err)
	out, err := os.OpenFile(paths.Output, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer out.Close()
	next := s.follow(t, "u-1")
	for _, text := range []string{"a\n", "b\n"} {
		before := next.text()
		_, err := out.WriteString(text)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return next.text() == before+text }, testkit.Timeout, testkit.Tick)
	}
	require.Equal(t, "old\n", old.text())
	for _, f := range []*follower{old, next} {
		f.stop()
		require.ErrorIs(t, <-f.done, context.Canceled)
	}
}
