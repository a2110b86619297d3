package usage_test

import (
	"io/fs"
	"maps"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
)

const group = "kubepods/pod1/fsb-a"

// tree returns a file system with files of the cgroup, by `hierarchy/file` or, for the unified hierarchy, `file`.
func tree(files map[string]string) fstest.MapFS {
	root := fstest.MapFS{}
	for name, content := range files {
		hierarchy, file, legacy := strings.Cut(name, "/")
		if !legacy {
			hierarchy, file = "", name
		}
		root[strings.TrimPrefix(hierarchy+"/"+group+"/"+file, "/")] = &fstest.MapFile{Data: []byte(content)}
	}
	return root
}

func with(files map[string]string, changes map[string]string) map[string]string {
	files = maps.Clone(files)
	for name, content := range changes {
		if content == "" {
			delete(files, name)
			continue
		}
		files[name] = content
	}
	return files
}

func legacyFiles() map[string]string {
	return map[string]string{
		"cpuacct/cpuacct.usage": "3500000000\n", "cpuacct/cpuacct.usage_user": "2500000000\n", "cpuacct/cpuacct.usage_sys": "1000000000\n",
		"cpuacct/cpuacct.stat": "user 249\nsystem 99\n",
		"cpu/cpu.stat":         "nr_periods 40\nnr_throttled 7\nthrottled_time 150000000\nnr_bursts 0\nburst_time 0\n",
		"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n",
		"memory/memory.usage_in_bytes": "10000000\n", "memory/memory.max_usage_in_bytes": "12000000\n", "memory/memory.limit_in_bytes": "134217728\n",
		"memory/memory.stat":        "cache 1\ninactive_file 5\ntotal_cache 4000000\ntotal_inactive_file 3000000\n",
		"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
		"pids/pids.current":         "9\n", "pids/pids.max": "64\n",
		"blkio/blkio.throttle.io_service_bytes_recursive": "8:0 Read 4096\n8:0 Write 100\n8:0 Sync 4196\n8:0 Async 0\n8:0 Discard 9\n8:0 Total 4205\n8:16 Read 4\n8:16 Write 1\nTotal 4210\n",
		"blkio/blkio.throttle.io_serviced_recursive":      "8:0 Read 3\n8:0 Write 2\n8:0 Total 5\nTotal 5\n",
	}
}

func unifiedFiles() map[string]string {
	return map[string]string{
		"cpu.stat": "usage_usec 3500000\nuser_usec 2500000\nsystem_usec 1000000\nnice_usec 0\nnr_periods 40\nnr_throttled 7\nthrottled_usec 150000\n",
		"cpu.max":  "150000 100000\n", "memory.current": "10000000\n", "memory.peak": "12000000\n", "memory.max": "134217728\n",
		"memory.stat":   "anon 1\nfile 4000000\ninactive_file 3000000\n",
		"memory.events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0\n",
		"pids.current":  "9\n", "pids.max": "64\n",
		"io.stat": "8:0 rbytes=4096 wbytes=100 rios=3 wios=2 dbytes=9 dios=1\n7:0 \n8:16 rbytes=4 wbytes=1 rios=0 wios=0 dbytes=0 dios=0\n",
	}
}

func ptr[T any](v T) *T { return &v }

func full() usage.Usage {
	return usage.Usage{
		CPU: usage.CPU{
			Total: ptr(3500 * time.Millisecond), User: ptr(2500 * time.Millisecond), System: ptr(time.Second),
			Throttled: ptr(150 * time.Millisecond), ThrottledPeriods: ptr(int64(7)), LimitMillis: ptr(int64(1500)),
		},
		Memory: usage.Memory{
			WorkingSet: ptr(int64(7_000_000)), Usage: ptr(int64(10_000_000)), Peak: ptr(int64(12_000_000)), Limit: ptr(int64(128 << 20)), OOMKills: ptr(int64(2)),
		},
		IO:   &usage.IO{ReadBytes: 4100, WrittenBytes: 101, Reads: 3, Writes: 2},
		PIDs: usage.PIDs{Current: ptr(int64(9)), Limit: ptr(int64(64))},
	}
}

// TestRead reads a cgroup of each kind. What the kernel does not have is nil and not 0.
func TestRead(t *testing.T) {
	type change = map[string]string
	legacy := map[string]struct {
		change change
		want   func(*usage.Usage)
	}{
		"all": {nil, func(*usage.Usage) {}},
		"an older kernel": {change{"cpuacct/cpuacct.usage_user": "", "memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, func(u *usage.Usage) {
			u.CPU.User, u.CPU.System, u.Memory.OOMKills = ptr(2490*time.Millisecond), ptr(990*time.Millisecond), nil
		}},
		"no limits": {change{"cpu/cpu.cfs_quota_us": "-1\n", "memory/memory.limit_in_bytes": "9223372036854771712\n", "pids/pids.max": "max\n"}, func(u *usage.Usage) {
			u.CPU.LimitMillis, u.Memory.Limit, u.PIDs.Limit = nil, nil, nil
		}},
		"a limit beyond 63 bits": {change{"memory/memory.limit_in_bytes": "18446744073709551615\n"}, func(u *usage.Usage) { u.Memory.Limit = nil }},
		"no block devices used": {change{"blkio/blkio.throttle.io_service_bytes_recursive": "Total 0\n", "blkio/blkio.throttle.io_serviced_recursive": "Total 0\n"}, func(u *usage.Usage) {
			u.IO = &usage.IO{}
		}},
		"no controller of block devices": {change{"blkio/blkio.throttle.io_service_bytes_recursive": "", "blkio/blkio.throttle.io_serviced_recursive": ""}, func(u *usage.Usage) { u.IO = nil }},
		"more inactive than used":        {change{"memory/memory.usage_in_bytes": "2000000\n"}, func(u *usage.Usage) { u.Memory.Usage, u.Memory.WorkingSet = ptr(int64(2_000_000)), ptr(int64(0)) }},
		"no statistics of memory":        {change{"memory/memory.stat": ""}, func(u *usage.Usage) { u.Memory.WorkingSet = nil }},
	}
	for name, tc := range legacy {
		t.Run("legacy, "+name, func(t *testing.T) {
			want := full()
			tc.want(&want)
			got, err := usage.Read(tree(with(legacyFiles(), tc.change)), "/"+group)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(want, got))
		})
	}
	unified := map[string]struct {
		change change
		want   func(*usage.Usage)
	}{
		"all":                    {nil, func(*usage.Usage) {}},
		"no limits":              {change{"cpu.max": "max 100000\n", "memory.max": "max\n", "pids.max": "max\n"}, func(u *usage.Usage) { u.CPU.LimitMillis, u.Memory.Limit, u.PIDs.Limit = nil, nil, nil }},
		"a kernel without peaks": {change{"memory.peak": ""}, func(u *usage.Usage) { u.Memory.Peak = nil }},
		"no controllers": {change{
			"cpu.stat": "usage_usec 3500000\nuser_usec 2500000\nsystem_usec 1000000\n", "cpu.max": "", "memory.current": "", "memory.peak": "", "memory.max": "",
			"memory.stat": "", "memory.events": "", "pids.current": "", "pids.max": "", "io.stat": "",
		}, func(u *usage.Usage) {
			*u = usage.Usage{CPU: usage.CPU{Total: u.CPU.Total, User: u.CPU.User, System: u.CPU.System}}
		}},
		"no block devices used": {change{"io.stat": "\n"}, func(u *usage.Usage) { u.IO = &usage.IO{} }},
	}
	for name, tc := range unified {
		t.Run("unified, "+name, func(t *testing.T) {
			want := full()
			tc.want(&want)
			root := tree(with(unifiedFiles(), tc.change))
			root["cgroup.controllers"] = &fstest.MapFile{Data: []byte("cpu io memory pids\n")}
			got, err := usage.Read(root, group)
			require.NoError(t, err)
			require.Empty(t, cmp.Diff(want, got))
		})
	}
}

// TestReadHybrid: beside legacy hierarchies the unified one has no controllers, and no figures.
func TestReadHybrid(t *testing.T) {
	root := tree(legacyFiles())
	root["unified/cgroup.controllers"] = &fstest.MapFile{}
	root["unified/"+group+"/cpu.stat"] = &fstest.MapFile{Data: []byte("usage_usec 1\n")}
	got, err := usage.Read(root, group)
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(full(), got))
}

// broken has files whose cgroup is removed while they are read, or that cannot be read.
type broken struct {
	fs.FS
	err error
}

func (b broken) Open(name string) (fs.File, error) {
	f, err := b.FS.Open(name)
	if err == nil && strings.Contains(name, group) {
		_ = f.Close()
		return nil, &fs.PathError{Op: "open", Path: name, Err: b.err}
	}
	return f, err
}

func TestReadFails(t *testing.T) {
	controllers := fstest.MapFS{"cgroup.controllers": &fstest.MapFile{}}
	for name, root := range map[string]fs.FS{
		"no legacy cgroup": fstest.MapFS{"memory/other/memory.stat": &fstest.MapFile{}}, "no unified cgroup": controllers,
		"it is removed": broken{tree(legacyFiles()), syscall.ENODEV},
	} {
		_, err := usage.Read(root, group)
		require.ErrorIs(t, err, errdefs.ErrNotFound, name)
	}
	_, err := usage.Read(broken{tree(legacyFiles()), syscall.EACCES}, group)
	require.ErrorIs(t, err, syscall.EACCES)
	require.NotErrorIs(t, err, errdefs.ErrNotFound)
	for file, content := range map[string]string{
		"cpuacct/cpuacct.usage": "abc\n", "memory/memory.oom_control": "oom_kill two\n", "pids/pids.current": "\n",
		"blkio/blkio.throttle.io_serviced_recursive": "8:0 Read x\n",
	} {
		_, err := usage.Read(tree(with(legacyFiles(), map[string]string{file: content})), group)
		require.ErrorContains(t, err, "reading the usage of cgroup "+group, file)
	}
}

// TestReadStaysInItsRoot: a path that leads out of the hierarchies names a cgroup below their roots.
func TestReadStaysInItsRoot(t *testing.T) {
	got, err := usage.Read(tree(legacyFiles()), "/../../"+group+"/x/..")
	require.NoError(t, err)
	require.Empty(t, cmp.Diff(full(), got))
}

const netDev = `Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo: 1000 10    0    0    0     0          0         0 1000 10    0    0    0     0       0          0
  eth0: 200 2 0 1 0 0 0 0 300 3 0 4 0 0 0 0
veth1:5 1 0 0 0 0 0 0 6 1 0 0 0 0 0 0
`

func TestReadNetwork(t *testing.T) {
	got, err := usage.ReadNetwork(netDev)
	require.NoError(t, err)
	require.Equal(t, usage.Network{ReceivedBytes: 205, SentBytes: 306, ReceivedPackets: 3, SentPackets: 4, ReceivedDropped: 1, SentDropped: 4}, got)
	for name, text := range map[string]string{"columns are missing": "eth0: 1 2\n", "no number": strings.Replace(netDev, "200", "x", 1)} {
		_, err := usage.ReadNetwork(text)
		require.ErrorContains(t, err, "reading the interface eth0", name)
	}
}
