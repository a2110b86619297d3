package cgroup_test

import (
	"os"
	"path/filepath"
	"testing"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/cgroup"
)

func TestCPULimitOfTheParent(t *testing.T) {
	root := t.TempDir()
	put := func(dir, quota string) {
		dir = filepath.Join(root, "cpu", dir)
		require.NoError(t, os.MkdirAll(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cpu.cfs_quota_us"), []byte(quota+"\n"), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "cpu.cfs_period_us"), []byte("100000\n"), 0o600))
	}
	put("kubepods/pod1", "50000")
	put("kubepods/pod2", "-1")
	legacy, unified := cgroup.At(root, false), cgroup.At(root, true)
	for path, want := range map[string]int64{"/kubepods/pod1/fsb-1": 500, "/kubepods/pod2/fsb-1": 1000, "/missing/fsb-1": 1000} {
		require.Equal(t, want, legacy.BoundCPU(1000, path), path)
		require.EqualValues(t, 1000, unified.BoundCPU(1000, path), path)
		require.EqualValues(t, 0, legacy.BoundCPU(0, path), path)
	}
}

// TestLimitFiles writes all limits, in both forms, to files that stand for a cgroup's.
func TestLimitFiles(t *testing.T) {
	quota, period, shares, memory, swap, pids := int64(50_000), uint64(100_000), uint64(512), int64(64<<20), int64(80<<20), int64(10)
	limits := &specs.LinuxResources{
		CPU: &specs.LinuxCPU{Quota: &quota, Period: &period, Shares: &shares}, Memory: &specs.LinuxMemory{Limit: &memory, Swap: &swap},
		Pids: &specs.LinuxPids{Limit: &pids},
	}
	for name, c := range map[string]struct {
		unified bool
		want    map[string]string
	}{
		"legacy": {false, map[string]string{
			"cpu/c/cpu.shares": "512", "cpu/c/cpu.cfs_period_us": "100000", "cpu/c/cpu.cfs_quota_us": "50000",
			"memory/c/memory.limit_in_bytes": "67108864", "memory/c/memory.memsw.limit_in_bytes": "83886080", "pids/c/pids.max": "10",
		}},
		"unified": {true, map[string]string{
			"c/cpu.weight": "20", "c/cpu.max": "50000 100000", "c/memory.max": "67108864", "c/memory.swap.max": "16777216", "c/pids.max": "10",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file := range c.want {
				require.NoError(t, os.MkdirAll(filepath.Join(root, filepath.Dir(file)), 0o755))
				require.NoError(t, os.WriteFile(filepath.Join(root, file), nil, 0o600))
			}
			tree := cgroup.At(root, c.unified)
			require.NoError(t, tree.Limit("/c", limits))
			for file, want := range c.want {
				raw, err := os.ReadFile(filepath.Join(root, file))
				require.NoError(t, err)
				require.Equal(t, want, string(raw), file)
			}
			require.NoError(t, tree.Limit("/c", &specs.LinuxResources{CPU: &specs.LinuxCPU{}, Memory: &specs.LinuxMemory{}, Pids: &specs.LinuxPids{}}), "nothing to limit")
		})
	}
}
