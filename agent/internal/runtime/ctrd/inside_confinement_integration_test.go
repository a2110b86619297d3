//go:build integration

package ctrd_test

import (
	"encoding/json"
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestInsideConfinement compares what a process sees that a call has started with what the sandbox's own process sees, in all configurations.
func TestInsideConfinement(t *testing.T) {
	server := containerd.Start(t)
	importProbe(t, server)
	for name, way := range insideWays() {
		r := newRuntime(t, server, way(t, server))
		for _, slot := range []bool{false, true} {
			for _, image := range []string{"root:test", "user:test"} {
				t.Run(name+", "+image+map[bool]string{true: ", slot", false: ""}[slot], func(t *testing.T) {
					want := probeReport(t, server, r, box(t, server, slot, image, "/probe"))
					b := box(t, server, slot, image, "sleep", "1000")
					require.NoError(t, launch(t.Context(), r, b))
					if !slot {
						require.NoError(t, r.SlotClaimed(b.ID))
					}
					out, stderr, exit := ran(t, r.Supervisor(b.ID), &wire.Start{Args: []string{"/probe"}})
					require.Zero(t, exit.Code, stderr)
					require.NoError(t, r.Delete(t.Context(), b.ID))
					var seen map[string]any
					require.NoError(t, json.Unmarshal([]byte(out), &seen), out)
					tidy(t, seen)
					for _, report := range []map[string]any{want, seen} {
						takeFirst(t, report, false)
						// What is different of two processes, and of two sandboxes.
						delete(report["Status"].(map[string]any), "NStgid")
						for _, key := range []string{"PID", "PPID", "SID", "PGID", "Processes", "cgroup", "UIDs", "GIDs"} {
							delete(report, key)
						}
					}
					for _, key := range slices.Sorted(maps.Keys(want)) {
						require.Equal(t, want[key], seen[key], key)
					}
					require.Len(t, seen, len(want))
				})
			}
		}
	}
}
