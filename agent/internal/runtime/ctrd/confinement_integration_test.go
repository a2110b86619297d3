//go:build integration

package ctrd_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/layout"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestEqualConfinement runs one program in all ways and compares all that it can see of its confinement.
func TestEqualConfinement(t *testing.T) {
	s := containerd.Start(t)
	runc, fsb, users := withSlots(t, s), newRuntime(t, s, own(t, s)), newRuntime(t, s, mapped(t, s))
	importProbe(t, s)
	for _, c := range []struct {
		name, image string
		change      func(*runtime.Container)
	}{
		{"root", "root:test", func(*runtime.Container) {}},
		{"a user", "user:test", func(*runtime.Container) {}},
		{"limits, directory, environment", "root:test", func(c *runtime.Container) {
			c.Limits = resources.Limits{CPUMillis: 250, MemoryBytes: 64 << 20, PIDs: 50}
			c.WorkingDir, c.Env = "/made/for/it", map[string]string{"B": "z", "TRACEPARENT": "00-1"}
			c.Args = []string{"one", "two three"}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var want map[string]any
			for _, way := range []struct {
				name    string
				runtime *ctrd.Runtime
				slot    bool
			}{
				{"runc", runc, false}, {"a slot of runc", runc, true}, {"fsb", fsb, false}, {"a slot of fsb", fsb, true},
				{"fsb with user namespaces", users, false}, {"a slot of fsb with user namespaces", users, true},
			} {
				b := box(t, s, way.slot, c.image, "/probe")
				c.change(&b)
				seen := probeReport(t, s, way.runtime, b)
				takeFirst(t, seen, way.runtime != runc)
				if want == nil {
					want = seen
				}
				if way.runtime != runc {
					seen = withoutSupervisor(t, want, seen)
				}
				if way.runtime == users {
					seen = withoutUsers(t, want, seen)
				}
				for _, key := range slices.Sorted(maps.Keys(want)) {
					require.Equal(t, want[key], seen[key], "%s: runc, then %s", key, way.name)
				}
				require.Len(t, seen, len(want))
			}
			require.NotEmpty(t, want["cgroup"])
			limits, calls := want["Limits"].(map[string]any), want["Syscalls"].(map[string]any)
			require.Equal(t, "0 0 bytes", limits["Max core file size"])
			files := ctrd.Rlimits()[0].Hard // less than the default on a machine that permits less
			require.Equal(t, fmt.Sprintf("%d %d files", files, files), limits["Max open files"])
			for _, call := range []string{"raw socket", "packet socket", "making a device"} {
				require.Equal(t, "operation not permitted", calls[call], call)
			}
		})
	}
}

// TestAddedCapabilities adds what a pool can add: root in a sandbox may then do it, however it was started, and an ordinary user may not.
func TestAddedCapabilities(t *testing.T) {
	s := containerd.Start(t)
	add := func(names ...string) func(*ctrd.Config) {
		change := own(t, s)
		return func(c *ctrd.Config) { change(c); c.AddCapabilities = names }
	}
	fsb := newRuntime(t, s, add("NET_RAW", "MKNOD", "AUDIT_WRITE"))
	runc := newRuntime(t, s, func(c *ctrd.Config) {
		handler := c.Handler
		add("NET_RAW", "MKNOD", "AUDIT_WRITE")(c)
		c.Handler = handler
	})
	importProbe(t, s)
	for _, way := range []struct {
		name    string
		runtime *ctrd.Runtime
		slot    bool
	}{{"runc", runc, false}, {"a slot of runc", runc, true}, {"fsb", fsb, false}, {"a slot of fsb", fsb, true}} {
		root := probeReport(t, s, way.runtime, box(t, s, way.slot, "root:test", "/probe"))
		calls, status := root["Syscalls"].(map[string]any), root["Status"].(map[string]any)
		require.Equal(t, "00000000a80425fb", status["CapEff"], way.name)
		for _, call := range []string{"raw socket", "packet socket", "making a device"} {
			require.Equal(t, "done", calls[call], "%s: %s", way.name, call)
		}
		user := probeReport(t, s, way.runtime, box(t, s, way.slot, "user:test", "/probe"))
		status = user["Status"].(map[string]any)
		require.Equal(t, "0000000000000000", status["CapEff"], way.name)
		require.Equal(t, "00000000a80425fb", status["CapBnd"], way.name)
	}
}

// importProbe makes images with the probe as /probe, for root and for an ordinary user.
func importProbe(t *testing.T, s *containerd.Server) {
	t.Helper()
	probe := filepath.Join(t.TempDir(), "probe")
	out, err := exec.CommandContext(t.Context(), "env", "CGO_ENABLED=0", "go", "build", "-o", probe, "../../slot/probe").CombinedOutput()
	require.NoError(t, err, "%s", out)
	raw, err := os.ReadFile(probe)
	require.NoError(t, err)
	options := []containerd.Option{containerd.WithFile("/probe", string(raw), 0o755), containerd.WithEnv("A=1", "B=x y")}
	s.Import(t, "docker.io/library/root:test", containerd.Image(t, options...))
	s.Import(t, "docker.io/library/user:test", containerd.Image(t, append(options, containerd.WithUser("1234:4321"))...))
}

// probeReport runs the probe in a container and returns its report, with the limits that its cgroup has.
func probeReport(t *testing.T, s *containerd.Server, r *ctrd.Runtime, c runtime.Container) map[string]any {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	require.NoError(t, launch(ctx, r, c))
	_, err := r.Wait(ctx, c.ID)
	require.NoError(t, err)
	limits := cgroupFiles(t, s, c.ID)
	require.NoError(t, r.Finish(ctx, c.ID, c.Record))
	out, err := os.ReadFile(c.LogPath)
	require.NoError(t, err)
	require.NoError(t, r.Delete(ctx, c.ID))
	var seen map[string]any
	require.NoError(t, json.Unmarshal(out, &seen), "%s", out)
	seen["cgroup"] = limits
	tidy(t, seen)
	return seen
}

// tidy takes out of a report what is not the runtime's: the order of mounts, and the signals that this program was started to ignore.
func tidy(t *testing.T, seen map[string]any) {
	t.Helper()
	withoutDoor(t, seen)
	sortStrings(seen["Mounts"])
	status := seen["Status"].(map[string]any)
	status["SigIgn"] = signals(t, status["SigIgn"].(string)) &^ inherited(t)
}

// withoutDoor checks the mounts that a container of runc has for a supervisor that joins it, and takes them out of a report.
func withoutDoor(t *testing.T, seen map[string]any) {
	t.Helper()
	var others, joins []any
	for _, m := range seen["Mounts"].([]any) {
		if strings.HasPrefix(m.(string), "/dev/fsb") {
			joins = append(joins, m)
		} else {
			others = append(others, m)
		}
	}
	for _, m := range joins {
		require.Regexp(t, "^(/dev/fsb/door ro,nosuid,nodev,noexec|/dev/fsb/programs ro,nosuid,nodev),", m)
	}
	require.Contains(t, []int{0, 2}, len(joins))
	seen["Mounts"] = others
}

// withoutSupervisor checks what is different beside a supervisor, which is pid 1, and returns the report without it.
func withoutSupervisor(t *testing.T, want, seen map[string]any) map[string]any {
	t.Helper()
	require.Equal(t, seen["PID"], seen["SID"], "it leads its session")
	require.Equal(t, seen["PID"], seen["PGID"])
	require.Len(t, seen["Processes"], 2)
	require.Contains(t, fmt.Sprint(seen["Processes"]), layout.InitPath)
	require.EqualValues(t, 1, seen["PPID"])
	for _, key := range []string{"PID", "PPID", "SID", "PGID", "Processes"} {
		seen[key] = want[key]
	}
	seen["Status"].(map[string]any)["NStgid"] = want["Status"].(map[string]any)["NStgid"]
	return seen
}

// takeFirst takes out of a report whether the memory of the first process can be written. That of a supervisor cannot.
func takeFirst(t *testing.T, seen map[string]any, supervised bool) {
	t.Helper()
	const memory = "write /proc/1/mem"
	paths := seen["Unreadable"].(map[string]any)
	if supervised {
		require.Equal(t, "permission denied", paths[memory])
	}
	delete(paths, memory)
}

// withoutUsers checks what is different in a user namespace, and returns the report without it.
func withoutUsers(t *testing.T, want, seen map[string]any) map[string]any {
	t.Helper()
	for _, key := range []string{"UIDs", "GIDs"} {
		ids := strings.Fields(seen[key].(string))
		require.Len(t, ids, 3)
		first, err := strconv.Atoi(ids[1])
		require.NoError(t, err)
		require.GreaterOrEqual(t, first, idrange.DefaultFirst)
		require.Equal(t, []string{"0", "65536"}, []string{ids[0], ids[2]})
		seen[key] = "0 0 4294967295"
	}
	// The kernel's own files, and the view of the agent's network, belong to root of the node, which has no id there.
	owners := seen["Owners"].(map[string]any)
	for _, path := range []string{"/proc/sys", "/sys"} {
		rest, ok := strings.CutPrefix(owners[path].(string), "65534:65534 ")
		require.True(t, ok, "%s: %s", path, owners[path])
		owners[path] = "0:0 " + rest
	}
	// Whatever the capabilities, no device can be made.
	const device = "making a device"
	calls := seen["Syscalls"].(map[string]any)
	require.Equal(t, "operation not permitted", calls[device])
	calls[device] = want["Syscalls"].(map[string]any)[device]
	// The owner is checked before the mount.
	paths, wanted := seen["Unreadable"].(map[string]any), want["Unreadable"].(map[string]any)
	for what, result := range paths {
		if result == "permission denied" && wanted[what] == "read-only file system" {
			paths[what] = wanted[what]
		}
	}
	for i, m := range seen["Mounts"].([]any) {
		seen["Mounts"].([]any)[i] = strings.Replace(m.(string), ",idmapped", "", 1)
	}
	return seen
}

// inherited returns the signals that this program ignores. Those that it was started with are passed on by containerd and runc, but not by our
// shim: in a cluster, what starts containerd decides about them.
func inherited(t *testing.T) uint64 {
	t.Helper()
	raw, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(raw)) {
		if set, ok := strings.CutPrefix(line, "SigIgn:"); ok {
			return signals(t, strings.TrimSpace(set))
		}
	}
	t.Fatal("the kernel reports no ignored signals")
	return 0
}

func signals(t *testing.T, set string) uint64 {
	t.Helper()
	n, err := strconv.ParseUint(set, 16, 64)
	require.NoError(t, err)
	return n
}

// sortStrings sorts a decoded list: the order in which mounts were made is not part of the confinement.
func sortStrings(list any) {
	if l, ok := list.([]any); ok {
		slices.SortFunc(l, func(a, b any) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	}
}

// cgroupFiles returns the limits that a container's cgroup has, by file.
func cgroupFiles(t *testing.T, s *containerd.Server, id string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, pattern := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/*"} {
		for _, name := range []string{
			"cpu.shares", "cpu.cfs_quota_us", "cpu.cfs_period_us", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max",
			"devices.list", "cpu.max", "cpu.weight", "memory.max", "memory.swap.max", "memory.oom_control",
		} {
			files, err := filepath.Glob(filepath.Join(pattern, s.CgroupParent, "fsb-"+id, name))
			require.NoError(t, err)
			for _, f := range files {
				raw, err := os.ReadFile(f)
				require.NoError(t, err)
				rules := strings.Split(strings.TrimSpace(string(raw)), "\n")
				// Before 1.2, runc permits /dev/net/tun, which no container has.
				rules = slices.DeleteFunc(rules, func(r string) bool { return r == "c 10:200 rwm" })
				slices.Sort(rules)
				found[name] = strings.Join(rules, "\n")
			}
		}
	}
	return found
}
