package host_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

const mountinfo = `22 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
40 22 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
41 22 0:31 / /sys/fs/cgroup/systemd rw shared:9 - cgroup cgroup rw,name=systemd
42 22 0:32 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
50 22 0:50 / /data/kubelet rw shared:1 master:2 - ext4 /dev/vda rw
51 50 0:51 / /data/kubelet/pods/a\040b/volume rw - tmpfs tmpfs rw
52 51 0:52 / /data/kubelet/pods/a\040b/volume rw - tmpfs tmpfs rw
53 22 0:53 / /data/kubelet-other rw - tmpfs tmpfs rw
54 22 0:4 net:[4026532] /run/x/ns//deleted rw - nsfs nsfs rw
broken line
`

func TestParseMountinfo(t *testing.T) {
	mounts := host.ParseMountinfo(mountinfo)
	require.Len(t, mounts, 9)
	require.Equal(t, host.Mount{Point: "/data/kubelet/pods/a b/volume", Type: "tmpfs", Root: "/", Super: []string{"rw"}}, mounts[5])
	require.Equal(t, "/run/x/ns", mounts[8].Point)
}

func TestShared(t *testing.T) {
	mounts := host.ParseMountinfo(mountinfo)
	require.True(t, host.SharedIn(mounts, "/data/kubelet"))
	require.True(t, host.SharedIn(mounts, "/data/kubelet/plugins"))
	require.False(t, host.SharedIn(mounts, "/data/kubelet/pods/a b/volume"), "a private mount below a shared one")
	require.False(t, host.SharedIn(mounts, "/data/kubelet-other/x"))
	require.False(t, host.SharedIn(mounts, "/data"))
}

func TestPickMounts(t *testing.T) {
	mounts := host.ParseMountinfo(mountinfo)
	volume := "/data/kubelet/pods/a b/volume"
	require.Equal(t, []string{volume, volume}, host.PickMounts(mounts, nil, []string{"/data/kubelet"}))
	require.Equal(t, []string{volume, volume, "/data/kubelet"},
		host.PickMounts(mounts, []string{"/data/kubelet"}, []string{"/data/kubelet"}), "the last made comes first")
	require.Empty(t, host.PickMounts(mounts, nil, []string{"/data/kubelet/pods/a b/volume", "/nowhere"}))
}

// A directory on a tmpfs stays as it is, and contents are never hidden.
func TestInMemory(t *testing.T) {
	memory, err := os.MkdirTemp("/dev/shm", "fsb-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(memory)) })
	require.NoError(t, host.InMemory(memory))
	mounts, err := host.Mounts()
	require.NoError(t, err)
	for _, mount := range mounts {
		require.NotEqual(t, memory, mount.Point, "it is in memory already")
	}

	disk, err := os.MkdirTemp("/var/tmp", "fsb-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(disk)) })
	require.NoError(t, os.WriteFile(filepath.Join(disk, "in-use"), nil, 0o600))
	require.ErrorContains(t, host.InMemory(disk), "take the cluster down once")
	require.FileExists(t, filepath.Join(disk, "in-use"))
	require.Error(t, host.InMemory(filepath.Join(disk, "missing")))
}

func TestHierarchies(t *testing.T) {
	require.Equal(t, host.Cgroups{
		{Root: "/sys/fs/cgroup/cpu", Controllers: []string{"cpu"}},
		{Root: "/sys/fs/cgroup/systemd", Controllers: []string{"name=systemd"}},
		{Root: "/sys/fs/cgroup/unified", V2: true},
	}, host.FindIn(host.ParseMountinfo(mountinfo)))
}

// A v1 cpuset that is left empty takes no process.
func TestCgroupsCreate(t *testing.T) {
	root := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(root, "cpuset.cpus"), []byte("0-1\n"), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(root, "cpuset.mems"), []byte("0\n"), 0o644))
	cgroups := host.Cgroups{{Root: root, Controllers: []string{"cpuset"}}, {Root: t.TempDir(), Controllers: []string{"cpu"}}}
	require.NoError(t, cgroups.Create("/a", 2048))
	cpus, err := os.ReadFile(filepath.Join(root, "a", "cpuset.cpus"))
	require.NoError(t, err)
	require.Equal(t, "0-1", string(cpus))
	shares, err := os.ReadFile(filepath.Join(cgroups[1].Root, "a", "cpu.shares"))
	require.NoError(t, err)
	require.Equal(t, "2048", string(shares))
}

func TestCgroupsRemove(t *testing.T) {
	cgroups := host.Cgroups{{Root: t.TempDir()}, {Root: t.TempDir()}}
	require.NoError(t, os.MkdirAll(filepath.Join(cgroups[0].Root, "a/b/c"), 0o755))
	require.NoError(t, cgroups.Remove(t.Context(), "/a"))
	require.NoDirExists(t, filepath.Join(cgroups[0].Root, "a"))
	require.NoError(t, cgroups.Remove(t.Context(), "/a"), "removing what does not exist is success")
}

func TestHasCapability(t *testing.T) {
	const without = "Name:\tx\nCapEff:\t000001fffeffffff\n"
	able, err := host.HasCapIn(without, 24)
	require.NoError(t, err)
	require.False(t, able)
	able, err = host.HasCapIn(without, 21)
	require.NoError(t, err)
	require.True(t, able)
	_, err = host.HasCapIn("Name:\tx\n", 21)
	require.Error(t, err)
}

func TestWriteFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "file")
	changed, err := host.WriteFile(path, []byte("one"), 0o600)
	require.NoError(t, err)
	require.True(t, changed)
	changed, err = host.WriteFile(path, []byte("one"), 0o600)
	require.NoError(t, err)
	require.False(t, changed)
	changed, err = host.WriteFile(path, []byte("two"), 0o600)
	require.NoError(t, err)
	require.True(t, changed)
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "no temporary file is left")
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	release, err := host.Lock(path)
	require.NoError(t, err)
	_, err = host.Lock(path)
	require.ErrorIs(t, err, host.ErrLocked)
	release()
	release, err = host.Lock(path)
	require.NoError(t, err)
	release()
}

func TestRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pid")
	self, err := host.Self()
	require.NoError(t, err)
	want := host.Record{Process: self, Started: time.Unix(1, 0).UTC(), Restarts: 3, LastExit: "signal: killed"}
	require.NoError(t, host.WriteRecord(path, want))
	got, err := host.ReadRecord(path)
	require.NoError(t, err)
	require.Equal(t, want, got)

	for name, content := range map[string]string{"cut short": `{"pid": 1, "star`, "empty": "", "of another kind": "1234\n"} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
			got, err := host.ReadRecord(path)
			require.NoError(t, err)
			require.False(t, got.Alive())
		})
	}
	got, err = host.ReadRecord(filepath.Join(t.TempDir(), "missing"))
	require.NoError(t, err)
	require.False(t, got.Alive())
}

func TestNeed(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "ptp"), nil, 0o755))
	require.Equal(t, dir, host.Need{Dirs: []string{"/nowhere", dir}, Files: []string{"ptp"}}.Find())
	require.Empty(t, host.Need{Dirs: []string{dir}, Files: []string{"ptp", "loopback"}}.Find())
	require.NotEmpty(t, host.Need{Program: "sh"}.Find())
	require.Empty(t, host.Need{Program: "no-such-program"}.Find())
}

func TestPoll(t *testing.T) {
	calls := 0
	require.NoError(t, host.Poll(t.Context(), time.Millisecond, func(context.Context) error {
		calls++
		if calls < 3 {
			return errors.New("again")
		}
		return nil
	}))
	failure := errors.New("broken")
	err := host.Poll(t.Context(), time.Millisecond, func(context.Context) error {
		return host.Permanent(fmt.Errorf("trying: %w", failure))
	})
	require.ErrorIs(t, err, failure)
	require.EqualError(t, err, "trying: broken")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	err = host.Poll(ctx, time.Millisecond, func(context.Context) error { return errors.New("not yet") })
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "not yet")
}

func TestRun(t *testing.T) {
	out, err := host.RunInput(t.Context(), "in", "sh", "-c", "cat; echo bad >&2; exit 3")
	require.Equal(t, "in", out)
	require.ErrorContains(t, err, "bad")
	require.ErrorContains(t, err, "exit status 3")
}
