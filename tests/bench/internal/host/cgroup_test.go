package host_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/host"
)

func TestParseCgroups(t *testing.T) {
	const unified, legacy = "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n", "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
	for mounts, want := range map[string]string{
		"tmpfs /sys/fs/cgroup tmpfs rw 0 0\n" + unified + "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n": "/sys/fs/cgroup/unified/a/b",
		unified + legacy:           "/sys/fs/cgroup/cpu,cpuacct/a/b",
		legacy + unified + "bad\n": "/sys/fs/cgroup/cpu,cpuacct/a/b",
	} {
		c, err := host.ParseCgroups([]byte(mounts))
		require.NoError(t, err)
		require.Equal(t, want, c.Dir("/a/b"))
	}
	_, err := host.ParseCgroups([]byte("tmpfs /sys/fs/cgroup tmpfs rw 0 0\n"))
	require.ErrorContains(t, err, "no hierarchy")
}

func TestParseCPU(t *testing.T) {
	for raw, want := range map[string]time.Duration{
		"123456789\n": 123456789,
		"usage_usec 2500\nuser_usec 2000\nsystem_usec 500\n": 2500 * time.Microsecond,
	} {
		got, err := host.ParseCPU([]byte(raw))
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	for _, bad := range []string{"", "user_usec 1\n", "usage_usec x\n"} {
		_, err := host.ParseCPU([]byte(bad))
		require.Error(t, err, bad)
	}
}

// The root of the hierarchy has this process, or one above it, and what the machine has used.
func TestCgroups(t *testing.T) {
	c, err := host.FindCgroups()
	require.NoError(t, err)
	_, err = c.Members("/")
	require.NoError(t, err)
	_, err = c.Members("/no-such-cgroup")
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = c.CPU("/no-such-cgroup")
	require.ErrorIs(t, err, os.ErrNotExist)
	used, err := c.CPU("/")
	require.NoError(t, err)
	require.Positive(t, used)
}

func TestCgroupsOfPods(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{"kubepods/burstable/poda-1/container", "kubepods/podb-2", "kubepods/other", "podc-3"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, path), 0o755))
	}
	c, err := host.ParseCgroups([]byte("cgroup2 " + dir + " cgroup2 rw 0 0\n"))
	require.NoError(t, err)
	pods, err := c.Pods("/kubepods")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"a-1": "/kubepods/burstable/poda-1", "b-2": "/kubepods/podb-2"}, pods)
	_, err = c.Pods("/kubepods/other")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestProgram(t *testing.T) {
	name, args := host.Program(os.Getpid())
	require.Equal(t, "host.test", name)
	require.Equal(t, os.Args, args)
	name, args = host.Program(1 << 30)
	require.Empty(t, name)
	require.Empty(t, args)
}
