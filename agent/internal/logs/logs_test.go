package logs_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type store struct {
	*logs.Store

	clock *clocktesting.FakeClock
	out   *os.File // appends, as a shim does
}

func newStore(t *testing.T, maxBytes int64) *store {
	t.Helper()
	clock := clocktesting.NewFakeClock(time.Unix(10_000, 0))
	s := logs.New(logs.Config{Root: t.TempDir(), Owner: "me", MaxBytes: maxBytes, Clock: clock})
	paths, err := s.Create("u-1", "host")
	require.NoError(t, err)
	hostname, err := os.ReadFile(paths.Hostname)
	require.NoError(t, err)
	require.Equal(t, "host\n", string(hostname))
	limit, err := os.ReadFile(filepath.Join(filepath.Dir(paths.Output), "limit"))
	require.NoError(t, err)
	require.Equal(t, strconv.FormatInt(maxBytes, 10), string(limit), "the janitor reads it")
	f, err := os.OpenFile(paths.Output, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	t.Cleanup(func() { f.Close() })
	return &store{Store: s, clock: clock, out: f}
}

func (s *store) write(t *testing.T, text string) {
	t.Helper()
	_, err := s.out.WriteString(text)
	require.NoError(t, err)
}

// at looks at the logs at a time, in seconds after the beginning.
func (s *store) at(seconds float64) {
	s.clock.SetTime(time.Unix(10_000, 0).Add(time.Duration(seconds * float64(time.Second))))
	s.Keep(logr.Discard())
}

func (s *store) read(t *testing.T, o logs.Options) string {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, s.Read(t.Context(), "u-1", o, nil, func(p []byte) error { out.Write(p); return nil }))
	return out.String()
}

func all() logs.Options { return logs.Options{Tail: -1} }

func TestTail(t *testing.T) {
	long := strings.Repeat("x", 100_000)
	for _, c := range []struct {
		name, text string
		tail       int64
		want       string
	}{
		{"all", "a\nb\nc\n", -1, "a\nb\nc\n"},
		{"none", "a\nb\n", 0, ""},
		{"one", "a\nb\nc\n", 1, "c\n"},
		{"two", "a\nb\nc\n", 2, "b\nc\n"},
		{"more than there are", "a\nb\n", 9, "a\nb\n"},
		{"unfinished line", "a\nb\nc", 2, "b\nc"},
		{"empty lines", "a\n\n\n", 2, "\n\n"},
		{"empty file", "", 3, ""},
		{"no newline at all", long, 1, long},
		{"across blocks", long + "\n" + long + "\nend\n", 2, long + "\nend\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newStore(t, 1<<20)
			s.write(t, c.text)
			require.Equal(t, c.want, s.read(t, logs.Options{Tail: c.tail}))
		})
	}
}

func TestSinceIsNeverLessThanAskedFor(t *testing.T) {
	s := newStore(t, 1<<20)
	begin := time.Unix(10_000, 0)
	for i := range 20 {
		s.write(t, fmt.Sprintf("line %02d\n", i))
		s.at(float64(i) + 0.5)
	}
	require.Equal(t, s.read(t, all()), s.read(t, logs.Options{Tail: -1, Since: begin}))
	for i := range 20 {
		// Line i was written before the look at i + 0.5: asked from i on, it and all after it come.
		got := s.read(t, logs.Options{Tail: -1, Since: begin.Add(time.Duration(i) * time.Second)})
		require.Contains(t, got, fmt.Sprintf("line %02d\n", i))
		require.LessOrEqual(t, strings.Count(got, "\n"), 20-i+1, "at the index's resolution")
		require.True(t, strings.HasPrefix(got, "line"), "at a line's beginning: %q", got)
	}
	require.Empty(t, s.read(t, logs.Options{Tail: -1, Since: begin.Add(time.Hour)}))
	require.Equal(t, "line 19\n", s.read(t, logs.Options{Tail: 1, Since: begin}))
}

func allocated(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Fstat(int(f.Fd()), &st))
	return st.Blocks * 512
}

func TestBoundFreesTheOldestAndLosesNothingInFlight(t *testing.T) {
	const bound = 256 << 10
	s := newStore(t, bound)
	line := strings.Repeat("y", 99)
	total := 0
	for round := range 40 {
		for i := range 300 {
			s.write(t, fmt.Sprintf("%06d %s\n", round*300+i, line))
			total++
		}
		s.at(float64(round))
		require.LessOrEqual(t, allocated(t, s.out), int64(bound+64<<10))
	}
	info, err := s.out.Stat()
	require.NoError(t, err)
	require.Greater(t, info.Size(), int64(4*bound), "offsets keep their meaning")
	got := strings.Split(strings.TrimSuffix(s.read(t, all()), "\n"), "\n")
	require.Greater(t, len(got), 1500)
	for i, l := range got {
		require.Equal(t, fmt.Sprintf("%06d %s", total-len(got)+i, line), l, "whole lines without a gap to the very last")
	}
	// The next agent continues where this one stopped.
	next := logs.New(logs.Config{Root: rootOf(s), Owner: "me", MaxBytes: bound, Clock: s.clock})
	next.Adopt("u-1")
	next.Keep(logr.Discard())
	require.LessOrEqual(t, allocated(t, s.out), int64(bound+64<<10))
	require.Contains(t, s.read(t, logs.Options{Tail: -1, Since: time.Unix(10_000, 0)}), fmt.Sprintf("%06d", total-1))
}

func rootOf(s *store) string {
	return strings.TrimSuffix(s.out.Name(), "/u-1/output.log")
}

func TestFollowSendsAllUntilTheEnd(t *testing.T) {
	s := newStore(t, 1<<20)
	s.write(t, "before\n")
	ended := make(chan struct{})
	var mu sync.Mutex
	var out bytes.Buffer
	done := make(chan error, 1)
	go func() {
		done <- s.Read(context.Background(), "u-1", logs.Options{Tail: -1, Follow: true}, ended, func(p []byte) error {
			mu.Lock()
			defer mu.Unlock()
			out.Write(p)
			return nil
		})
	}()
	text := func() string { mu.Lock(); defer mu.Unlock(); return out.String() }
	require.Eventually(t, func() bool { return text() == "before\n" }, testkit.Timeout, testkit.Tick)
	want := "before\n"
	for i := range 50 {
		s.write(t, fmt.Sprintf("%d\n", i))
		want += fmt.Sprintf("%d\n", i)
	}
	require.Eventually(t, func() bool { return text() == want }, testkit.Timeout, testkit.Tick)
	s.write(t, "last words")
	close(ended)
	require.NoError(t, <-done)
	require.Equal(t, want+"last words", text())
}

func TestFollowEnds(t *testing.T) {
	s := newStore(t, 1<<20)
	s.write(t, "x\n")
	ctx, cancel := context.WithCancel(t.Context())
	err := s.Read(ctx, "u-1", logs.Options{Tail: -1, Follow: true}, make(chan struct{}), func([]byte) error { cancel(); return nil })
	require.ErrorIs(t, err, context.Canceled)
	boom := errors.New("the receiver is gone")
	err = s.Read(t.Context(), "u-1", logs.Options{Tail: -1, Follow: true}, make(chan struct{}), func([]byte) error { return boom })
	require.ErrorIs(t, err, boom)
	// A log that is removed while it is followed is still sent to its end.
	ended := make(chan struct{})
	var out bytes.Buffer
	err = s.Read(t.Context(), "u-1", logs.Options{Tail: -1, Follow: true}, ended, func(p []byte) error {
		if out.Len() == 0 {
			s.write(t, "y\n")
			require.NoError(t, s.Remove("u-1"))
			close(ended)
		}
		out.Write(p)
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, "x\ny\n", out.String())
	require.True(t, errdefs.IsNotFound(s.Read(t.Context(), "u-1", all(), nil, nil)))
}

func TestReaderThatIsOvertakenSkipsWhatWasFreed(t *testing.T) {
	const bound = 128 << 10
	s := newStore(t, bound)
	line := strings.Repeat("z", 93)
	n := 0
	fill := func() {
		for range 3000 {
			s.write(t, fmt.Sprintf("%05d %s\n", n, line))
			n++
		}
	}
	fill()
	first := true
	var out bytes.Buffer
	require.NoError(t, s.Read(t.Context(), "u-1", all(), nil, func(p []byte) error {
		out.Write(p)
		if first {
			first = false
			fill()
			s.at(1)
		}
		return nil
	}))
	require.NotContains(t, out.String(), "\x00")
	require.True(t, strings.HasSuffix(out.String(), fmt.Sprintf("%05d %s\n", n-1, line)))
}

func TestIndexIsBounded(t *testing.T) {
	s := newStore(t, 1<<20)
	for i := range 10_000 {
		s.write(t, "x\n")
		s.at(float64(i) * 2)
	}
	info, err := os.Stat(strings.Replace(s.out.Name(), "output.log", "index", 1))
	require.NoError(t, err)
	require.LessOrEqual(t, info.Size(), int64(4097*16))
	got := s.read(t, logs.Options{Tail: -1, Since: time.Unix(10_000, 0).Add(19_990 * time.Second)})
	require.GreaterOrEqual(t, strings.Count(got, "\n"), 4)
	require.Less(t, strings.Count(got, "\n"), 100)
}

func TestStartedAndIDs(t *testing.T) {
	s := newStore(t, 1<<20)
	_, ok := s.StartedAt("u-1")
	require.False(t, ok)
	at := time.Unix(5, 7).UTC()
	require.NoError(t, s.MarkStarted("u-1", at))
	got, ok := s.StartedAt("u-1")
	require.True(t, ok)
	require.True(t, at.Equal(got))
	for _, id := range []string{"", ".", "..", "a/b", "../u-1", ".new-x"} {
		_, err := s.Create(id, "h")
		require.True(t, errdefs.IsInvalidArgument(err), "%q: %v", id, err)
		require.True(t, errdefs.IsInvalidArgument(s.Remove(id)), id)
	}
	require.NoError(t, s.Remove("u-1"))
	require.NoError(t, s.Remove("u-1"))
}

func TestCreateReplacesOwnLeftoverAndRefusesAnothers(t *testing.T) {
	s := newStore(t, 1<<20)
	s.write(t, "old\n")
	_, err := s.Create("u-1", "host")
	require.NoError(t, err)
	require.Empty(t, s.read(t, all()))
	other := logs.New(logs.Config{Root: rootOf(s), Owner: "other"})
	_, err = other.Create("u-1", "host")
	require.True(t, errdefs.IsAlreadyExists(err), "%v", err)
	entries, err := os.ReadDir(rootOf(s))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

func TestRunKeepsUntilTheEnd(t *testing.T) {
	s := newStore(t, 128<<10)
	s.write(t, strings.Repeat(strings.Repeat("w", 99)+"\n", 4000))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	require.Eventually(t, func() bool {
		s.clock.Step(time.Second)
		return allocated(t, s.out) <= 128<<10+8<<10
	}, testkit.Timeout, testkit.Tick)
	cancel()
	require.NoError(t, <-done)
}

// TestFastLogs writes twice the bound between two checks of all logs.
func TestFastLogs(t *testing.T) {
	s := newStore(t, 128<<10)
	text := strings.Repeat(strings.Repeat("w", 99)+"\n", 2600)
	s.write(t, text)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	require.Eventually(t, func() bool { return allocated(t, s.out) <= 128<<10+8<<10 }, testkit.Timeout, testkit.Tick)
	s.write(t, text)
	steps := 0
	require.Eventually(t, func() bool {
		steps++
		s.clock.Step(time.Millisecond)
		return allocated(t, s.out) <= 128<<10+8<<10
	}, testkit.Timeout, testkit.Tick)
	require.Less(t, steps, 200, "before all logs are checked again")
	cancel()
	require.NoError(t, <-done)
}

// TestNothingIsMadeInALogThatIsReleased is for those who remove the directory: a file that comes while they do makes the
// removal fail.
func TestNothingIsMadeInALogThatIsReleased(t *testing.T) {
	root := t.TempDir()
	s := logs.New(logs.Config{Root: root, Owner: "me"})
	var wg sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	wg.Go(func() {
		for ctx.Err() == nil {
			s.Keep(logr.Discard())
		}
	})
	defer wg.Wait()
	defer stop()
	for i := range 500 {
		id := fmt.Sprintf("u%d-1", i)
		paths, err := s.Create(id, "host")
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(paths.Output, []byte("out\n"), 0o600))
		s.Release(id)
		s.Release(id)
		require.NoError(t, os.RemoveAll(filepath.Dir(paths.Output)))
	}
	require.NoError(t, s.Remove("u1-1"))
}

// TestIndexAfterACrash: a crash of the node may lose output that the index knows of, or tear an entry. Reading skips nothing, and
// what is indexed from then on can be found.
func TestIndexAfterACrash(t *testing.T) {
	for name, index := range map[string][]byte{
		"output was lost": indexOf(10_000, 8, 10_001, 400),
		"a torn entry":    indexOf(10_000, 8, 10_001, 16)[:20],
		"out of order":    indexOf(10_000, 8, 10_001, 4),
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, 1<<20)
			require.NoError(t, os.WriteFile(filepath.Join(filepath.Dir(s.out.Name()), "index"), index, 0o600))
			s.write(t, "line 01\nline 02\n")
			since := func(seconds int64) string {
				return s.read(t, logs.Options{Tail: -1, Since: time.Unix(10_000+seconds, 0)})
			}
			require.Equal(t, "line 02\n", since(2))
			for i := range 4 {
				s.at(float64(10 + 2*i))
				s.write(t, fmt.Sprintf("later %d\n", i))
			}
			require.Equal(t, "line 02\nlater 0\nlater 1\nlater 2\nlater 3\n", since(2))
			require.Equal(t, "later 2\nlater 3\n", since(15))
		})
	}
}
