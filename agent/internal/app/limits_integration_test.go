//go:build integration

package app_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// ended waits for the end of a sandbox's process.
func (a *agent) ended(t *testing.T, name string) *agentv1.SandboxReport {
	t.Helper()
	var found *agentv1.SandboxReport
	require.Eventually(t, func() bool {
		for _, r := range a.snapshot(t).GetSandboxes() {
			if r.GetRecord().GetName() == name && r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
				found = r
			}
		}
		return found != nil
	}, testkit.Timeout, testkit.Tick, "%s runs on", name)
	return found
}

// TestBombsWithoutLimits has sandboxes, none of which asks for limits, that start processes, take memory, open files and
// fill the disk without end. A neighbor is not affected, and the agent runs further sandboxes.
func TestBombsWithoutLimits(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, func(c *app.Config) {
		c.MaxDisk, c.MaxLimits = runtime.DiskUsage{Bytes: 16 << 20, Inodes: 1000}, resources.Limits{MemoryBytes: 256 << 20, PIDs: 100}
	})
	neighbor := record("neighbor", nil)
	a.mustCreate(t, neighbor)
	output := func(name, script string) (string, *agentv1.SandboxReport) {
		r := record(name, sh(script))
		a.mustCreate(t, r)
		report := a.ended(t, name)
		text := a.logs(t, &agentv1.StreamLogsRequest{Fence: r.GetFence()})
		a.delete(t, r.GetFence(), 0)
		return text, report
	}

	text, report := output("fork", `n=0; while [ $n -lt 200 ]; do sleep 1000 & n=$((n+1)); done; echo started all`)
	require.NotContains(t, text, "started all")
	require.Contains(t, text, "fork", "%v", report)
	_, report = output("memory", `exec tail -c 1000000000 /dev/zero`)
	require.Equal(t, "OOMKilled", report.GetReason(), "%v", report)
	text, _ = output("files", `ulimit -n; ulimit -Hn`)
	var own unix.Rlimit
	require.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &own))
	files := min(65536, own.Max)
	require.Equal(t, fmt.Sprintf("%d\n%d\n", files, files), text)
	_, report = output("disk", `dd if=/dev/zero of=/large bs=1M count=64; sync; exec sleep 1000`)
	require.Equal(t, "DiskLimitExceeded", report.GetReason())
	require.Contains(t, report.GetMessage(), "more than the 16777216 allowed")
	_, report = output("inodes", `mkdir /many; cd /many; seq 2000 | xargs touch; exec sleep 1000`)
	require.Equal(t, "DiskLimitExceeded", report.GetReason())
	require.Contains(t, report.GetMessage(), "files, more than the 1000 allowed")
	_, report = output("deep", `i=0; while [ $i -lt 600 ]; do mkdir d; cd d; i=$((i+1)); done; exec sleep 1000`)
	require.Contains(t, report.GetMessage(), "nest deeper than")
	// The snapshotter's own measurement failed for ever at a path that is too long.
	_, report = output("hidden", `n=$(printf %0200d 0); i=0; while [ $i -lt 30 ]; do mkdir $n; cd $n; i=$((i+1)); done; dd if=/dev/zero of=large bs=1M count=64; exec sleep 1000`)
	require.Equal(t, "DiskLimitExceeded", report.GetReason())
	_, report = output("churn", `dd if=/dev/zero of=/large bs=1M count=64; while :; do mkdir -p /a/b; touch /a/b/1 /a/b/2; rm -r /a; done`)
	require.Equal(t, "DiskLimitExceeded", report.GetReason())

	for _, r := range a.snapshot(t).GetSandboxes() {
		require.Equal(t, "neighbor", r.GetRecord().GetName())
		require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, r.GetState())
	}
	a.delete(t, neighbor.GetFence(), 0)
	a.stop()
	s.CheckClean(t)
}
