package host_test

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestParseStat(t *testing.T) {
	line := "4242 (a (b) c) S 17 4242 4242 0 -1 4194560 1 2 3 4 250 50 7 8 20 0 9 0 123 1000000 300 18446744073709551615 1 1 0\n"
	got, err := host.ParseStat([]byte(line))
	require.NoError(t, err)
	require.Equal(t, host.Process{Parent: 17, CPUSeconds: 3, RSSBytes: 300 * int64(os.Getpagesize())}, got)
	for _, bad := range []string{"", "1 (x) S 1 2", "1 x S 1", "1 (x) S a b c d e f g h i j k l m n o p q r s t u v"} {
		_, err := host.ParseStat([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestParseRollup(t *testing.T) {
	got, err := host.ParseRollup([]byte("55d-7ff ---p 00000000 00:00 0    [rollup]\nRss:    1000 kB\nPss:     512 kB\nPss_Dirty:  100 kB\n"))
	require.NoError(t, err)
	require.EqualValues(t, 512<<10, got)
	_, err = host.ParseRollup([]byte("Rss: 1000 kB\n"))
	require.Error(t, err)
}

// What the kernel reports about this process is plausible.
func TestThisProcess(t *testing.T) {
	p, err := host.ReadProcess(os.Getpid())
	require.NoError(t, err)
	require.Equal(t, os.Getppid(), p.Parent)
	require.Greater(t, p.RSSBytes, int64(1<<20))
	pss, err := host.PSS(os.Getpid())
	require.NoError(t, err)
	require.Greater(t, pss, int64(1<<18))
	e, err := host.Describe(t.Context())
	require.NoError(t, err)
	require.NotEmpty(t, e.Kernel)
	require.Positive(t, e.Cores)
	require.Greater(t, e.MemoryMiB, 16)
	require.GreaterOrEqual(t, len(e.Facts()), 5)
	_, err = host.ReadProcess(1 << 30)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = host.CPUTime(1 << 28)
	require.Error(t, err)
	_, err = host.PSS(1 << 30)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// Two ways to ask for the same: one is exact, the other counts what is past in hundredths of a second.
func TestCPUTime(t *testing.T) {
	var u unix.Rusage
	for u.Utime.Nano()+u.Stime.Nano() < int64(100*time.Millisecond) {
		require.NoError(t, unix.Getrusage(unix.RUSAGE_SELF, &u))
	}
	p, err := host.ReadProcess(os.Getpid())
	require.NoError(t, err)
	exact, err := host.CPUTime(os.Getpid())
	require.NoError(t, err)
	require.GreaterOrEqual(t, exact.Seconds(), p.CPUSeconds)
	require.Less(t, exact, time.Duration(u.Utime.Nano()+u.Stime.Nano())+10*time.Second, "in nanoseconds, of this process")
}

func TestCommit(t *testing.T) {
	dir := t.TempDir()
	_, err := host.Commit(t.Context(), dir)
	require.Error(t, err)
	git := func(args ...string) {
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-C", dir, "-c", "user.name=t", "-c", "user.email=t@example.com"}, args...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	git("init", "-q")
	require.NoError(t, os.WriteFile(dir+"/a", []byte("1"), 0o600))
	git("add", "a")
	git("commit", "-q", "-m", "a")
	clean, err := host.Commit(t.Context(), dir)
	require.NoError(t, err)
	require.Regexp(t, "^[0-9a-f]{12,}$", clean)
	require.NoError(t, os.WriteFile(dir+"/a", []byte("2"), 0o600))
	dirty, err := host.Commit(t.Context(), dir)
	require.NoError(t, err)
	require.Equal(t, clean+"-dirty", dirty)
}
