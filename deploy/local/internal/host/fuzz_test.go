package host_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/host"
)

// FuzzStat reads the stat of a process that chose its own name.
func FuzzStat(f *testing.F) {
	f.Add("sleep", 42, 7, uint64(123456))
	f.Add("a) S 1 (b", 1, 0, uint64(0))
	f.Add(") Z 7 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 9 1 2\n", 3, 2, ^uint64(0))
	f.Fuzz(func(t *testing.T, name string, pid, ppid int, started uint64) {
		got, err := host.ParseStat(fmt.Sprintf("%d (%s) S %d 42 42 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 %d 1 2\n", pid, name, ppid, started))
		require.NoError(t, err)
		require.Equal(t, host.Info{Process: host.Process{PID: pid, StartTime: started}, PPID: ppid}, got)
		_, _ = host.ParseStat(name)
	})
}

// FuzzCgroups reads /proc/PID/cgroup. A path contains what it may, and a process is in each of its cgroups.
func FuzzCgroups(f *testing.F) {
	f.Add("12:cpu,cpuacct:/fsb-local/system\n1:name=systemd:/fsb-local/system\n0::/user.slice\nbroken\n")
	f.Add("0::/a:b\n0::/a:b\n0::\n")
	f.Fuzz(func(t *testing.T, text string) {
		paths := host.ParseCgroups(text)
		require.True(t, slices.IsSorted(paths))
		require.Len(t, slices.Compact(slices.Clone(paths)), len(paths))
		info := host.Info{Cgroups: paths}
		for _, p := range paths {
			require.Contains(t, text, ":"+p)
			require.True(t, info.InCgroup(p))
			if i := strings.LastIndexByte(p, '/'); i > 0 {
				require.True(t, info.InCgroup(p[:i]), "of the one above")
			}
		}
	})
}
