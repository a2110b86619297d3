//go:build integration

package app_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestCrashLosesNothing kills the agent's process while sandboxes write, end, and are being deleted. They run on without it,
// and the next process restores everything: states, output, capacity, ports, the deletion that had begun, and that the agent
// was drained. It logs how long that takes; the bound is for a busy machine.
func TestCrashLosesNothing(t *testing.T) {
	binary := buildAgent(t)
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a, kill := spawn(t, s, binary, "--capacity", "4")
	writer := func(name string, port int32) *agentv1.SandboxRecord {
		r := record(name, sh("i=0; while true; do echo line $i; i=$((i+1)); sleep 0.01; done"))
		r.Spec.Ports = []int32{port}
		a.mustCreate(t, r)
		return r
	}
	writers := []*agentv1.SandboxRecord{writer("w1", 18081), writer("w2", 18082)}
	ends := record("ends", sh("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); sleep 0.01; done; exit 7"))
	a.mustCreate(t, ends)
	lingers := record("lingers", sh("trap : TERM; echo ready; while true; do sleep 0.1; done"))
	a.mustCreate(t, lingers)
	output := func(r *agentv1.SandboxRecord) int64 {
		info, err := os.Stat(filepath.Join(s.LogRoot, r.GetFence().GetSandboxUid()+"-1", "output.log"))
		require.NoError(t, err)
		return info.Size()
	}
	require.Eventually(t, func() bool { return output(writers[0]) > 0 && output(writers[1]) > 0 && output(lingers) > 0 }, testkit.Timeout, testkit.Tick)
	beginDelete(t, a, lingers)
	_, err := a.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: podUID})
	require.NoError(t, err)
	kill()

	dead := output(writers[0])
	require.Eventually(t, func() bool { return output(writers[0]) > dead+500 }, testkit.Timeout, testkit.Tick, "sandboxes run on")
	begun := time.Now()
	a, _ = spawn(t, s, binary, "--capacity", "3") // of the four sandboxes the one that has ended holds no capacity unit
	snapshot := a.snapshot(t)
	took := time.Since(begun)
	t.Logf("%d sandboxes are managed again %v after the start of the next agent", len(snapshot.GetSandboxes()), took)
	require.Less(t, took, 15*time.Second)
	require.Len(t, snapshot.GetSandboxes(), 4)
	for _, w := range writers {
		require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, a.report(t, w).GetState())
	}
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATING, a.report(t, lingers).GetState())
	require.Len(t, snapshot.GetTombstones(), 1)
	require.Equal(t, "Draining", snapshot.GetNotAcceptingReason())
	require.Equal(t, int32(7), a.waitState(t, ends, agentv1.SandboxState_SANDBOX_STATE_STOPPED).GetExitCode())

	_, err = a.create(t.Context(), record("drained", nil))
	require.Equal(t, fault.AgentDraining, fault.ReasonOf(err), "%v", err)
	_, err = a.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: podUID, Resume: true})
	require.NoError(t, err)
	_, err = a.create(t.Context(), record("over", nil))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err), "%v", err)
	a.delete(t, lingers.GetFence(), 0)
	_, err = a.create(t.Context(), record("port", func(s *sandboxv1.SandboxSpec) { s.Ports = []int32{18082} }))
	require.Equal(t, fault.PortConflict, fault.ReasonOf(err), "%v", err)
	_, err = a.create(t.Context(), lingers)
	require.Equal(t, fault.SandboxTerminating, fault.ReasonOf(err), "%v", err)
	_, err = a.ForgetTombstone(t.Context(), &agentv1.ForgetTombstoneRequest{Fence: lingers.GetFence()})
	require.NoError(t, err)

	require.Equal(t, 100, consecutive(t, a.logs(t, &agentv1.StreamLogsRequest{Fence: ends.GetFence(), Follow: true})))
	for _, w := range writers {
		t.Logf("%s: %d lines, none lost", w.GetName(), consecutive(t, a.logs(t, &agentv1.StreamLogsRequest{Fence: w.GetFence()})))
		a.delete(t, w.GetFence(), 0)
	}
	a.delete(t, ends.GetFence(), 0)
	s.CheckClean(t)
}

// beginDelete begins a deletion with a tombstone and a grace period of an hour, and returns once it has begun.
func beginDelete(t *testing.T, a *agent, r *agentv1.SandboxRecord) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := a.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{
		Fence: r.GetFence(), GracePeriod: durationpb.New(time.Hour),
		Tombstone: &agentv1.Tombstone{Fence: r.GetFence(), Namespace: r.GetNamespace(), Name: r.GetName()},
	})
	require.NoError(t, err)
	m, err := stream.Recv()
	require.NoError(t, rpc.FromStatus(err))
	require.Equal(t, agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT, m.GetStage())
}

// consecutive counts the lines of a writer. None may be missing, doubled or torn, except that the last may be incomplete.
func consecutive(t *testing.T, out string) int {
	t.Helper()
	lines := strings.Split(out, "\n")
	for i, line := range lines[:len(lines)-1] {
		require.Equal(t, fmt.Sprintf("line %d", i), line)
	}
	return len(lines) - 1
}
