//go:build integration

package ctrd_test

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestOwnExecConfinement compares what a process sees that is executed in a container: with our shim and with runc's, cold and in slots, and
// with what the container's own process sees.
func TestOwnExecConfinement(t *testing.T) {
	s := containerd.Start(t)
	importProbe(t, s)
	runc, fsb, users := withSlots(t, s), newRuntime(t, s, own(t, s)), newRuntime(t, s, mapped(t, s))
	for _, c := range []struct {
		name, image string
		change      func(*runtime.Container)
	}{
		{"root", "root:test", func(*runtime.Container) {}},
		{"a user", "user:test", func(*runtime.Container) {}},
		{"limits, directory, environment, no network", "root:test", func(c *runtime.Container) {
			c.Limits = resources.Limits{CPUMillis: 500, MemoryBytes: 64 << 20, PIDs: 50}
			c.WorkingDir, c.Env, c.Network = "/made/for/it", map[string]string{"B": "z", "TRACEPARENT": "00-1"}, runtime.NetworkNone
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			first := box(t, s, false, c.image, "/probe", "one", "two three")
			c.change(&first)
			want := probeReport(t, s, fsb, first)
			delete(want, "cgroup")
			takeFirst(t, want, true)
			var before map[string]any
			for _, way := range []struct {
				name    string
				runtime *ctrd.Runtime
				slot    bool
			}{
				{"runc", runc, false}, {"fsb", fsb, false}, {"a slot of fsb", fsb, true},
				{"fsb with user namespaces", users, false}, {"a slot of fsb with user namespaces", users, true},
			} {
				if first.Network == runtime.NetworkNone && way.slot {
					continue // slots have the network of the agent
				}
				b := box(t, s, way.slot, c.image, "sleep", "1000")
				c.change(&b)
				require.NoError(t, launch(t.Context(), way.runtime, b))
				code, out, stderr := execute(t, s, b.ID, nil, "/probe", "one", "two three")
				require.Zero(t, code, stderr)
				var seen map[string]any
				require.NoError(t, json.Unmarshal([]byte(out), &seen), "%s", out)
				tidy(t, seen)
				requireInside(t, s, b.ID)
				require.NoError(t, way.runtime.Delete(t.Context(), b.ID))
				// The ids of processes differ, and who else is there.
				require.Equal(t, seen["PID"], seen["SID"], "it leads its session")
				require.Equal(t, seen["PID"], seen["PGID"])
				processes := 2
				if way.name != "runc" {
					processes++ // the supervisor
				}
				require.Len(t, seen["Processes"], processes)
				for _, key := range []string{"PID", "PPID", "SID", "PGID", "Processes"} {
					delete(seen, key)
				}
				delete(seen["Status"].(map[string]any), "NStgid")
				if before == nil {
					before = seen
				}
				takeFirst(t, seen, way.name != "runc")
				if way.runtime == users {
					seen = withoutUsers(t, before, seen)
				}
				for _, key := range slices.Sorted(maps.Keys(before)) {
					require.Equal(t, before[key], seen[key], "%s: runc, then %s", key, way.name)
				}
				if way.name == "runc" {
					continue
				}
				delete(want["Status"].(map[string]any), "NStgid")
				for _, key := range slices.Sorted(maps.Keys(seen)) {
					require.Equal(t, want[key], seen[key], "%s: the container's process, then one executed with %s", key, way.name)
				}
			}
		})
	}
}

// requireInside executes a process in a container, and compares its namespaces and cgroups with those of the container's own.
func requireInside(t *testing.T, s *containerd.Server, id string) {
	t.Helper()
	e, err := addProcess(t, s, id, nil, nil, "sleep", "1000")
	require.NoError(t, err)
	require.NoError(t, e.Start(t.Context()))
	task, _ := processOf(t, s, id)
	first, other := "/proc/"+strconv.Itoa(int(task.Pid())), "/proc/"+strconv.Itoa(int(e.Pid()))
	for _, name := range []string{"user", "mnt", "pid", "uts", "ipc", "net", "cgroup", "time"} {
		want, err := os.Readlink(filepath.Join(first, "ns", name))
		require.NoError(t, err)
		have, err := os.Readlink(filepath.Join(other, "ns", name))
		require.NoError(t, err)
		require.Equal(t, want, have, name)
	}
	for _, file := range []string{"cgroup", "limits", "oom_score_adj", "mountinfo"} {
		want, err := os.ReadFile(filepath.Join(first, file))
		require.NoError(t, err)
		have, err := os.ReadFile(filepath.Join(other, file))
		require.NoError(t, err)
		require.Equal(t, string(want), string(have), file)
	}
	require.NoError(t, e.Kill(t.Context(), 9))
	code, _, _ := e.result(t)
	require.EqualValues(t, 137, code)
}
