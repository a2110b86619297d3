package sandbox_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

const (
	stateRunning = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stateStopped = agentv1.SandboxState_SANDBOX_STATE_STOPPED

	stateTerminating = agentv1.SandboxState_SANDBOX_STATE_TERMINATING
	gone             = agentv1.SandboxState_SANDBOX_STATE_UNSPECIFIED
)

func found(t *testing.T, r *agentv1.SandboxRecord, task runtime.TaskState) runtime.Found {
	t.Helper()
	raw, err := anypb.New(r)
	require.NoError(t, err)
	id := identity.Identity{
		Namespace: r.GetNamespace(), Name: r.GetName(), SandboxUID: r.GetFence().GetSandboxUid(), Attempt: r.GetFence().GetAttempt(),
		AgentUID: r.GetFence().GetAgentUid(), Pool: "default", State: identity.StateClaimed,
	}
	return runtime.Found{ID: id.ContainerID(), Labels: id.Labels(), Record: raw, Task: task, CreatedAt: time.Unix(500, 0)}
}

// TestAdoptMatrix has the table of Adopt's comment, and damaged containers.
func TestAdoptMatrix(t *testing.T) {
	report, err := anypb.New(&agentv1.SandboxReport{ExitCode: new(int32(6)), Reason: "Error"})
	require.NoError(t, err)
	other, err := anypb.New(durationpb.New(1))
	require.NoError(t, err)
	for _, c := range []struct {
		name    string
		task    runtime.TaskState
		started bool
		change  func(*runtime.Found)
		want    agentv1.SandboxState
		code    int32
	}{
		{name: "running", task: runtime.TaskRunning, want: stateRunning},
		{name: "running, start recorded", task: runtime.TaskRunning, started: true, want: stateRunning},
		{name: "stopped", task: runtime.TaskStopped, want: stateStopped, code: 9},
		{name: "finished", change: func(f *runtime.Found) { f.Report = report }, want: stateStopped, code: 6},
		{name: "lost, started", started: true, want: stateStopped},
		{name: "lost, persisted", change: func(f *runtime.Found) { f.Labels[identity.KeyPersisted] = "true" }, want: stateStopped},
		{name: "never acknowledged", want: gone},
		{name: "never started", task: runtime.TaskCreated, want: gone},
		{name: "slot", task: runtime.TaskRunning, change: func(f *runtime.Found) {
			f.Labels = identity.Identity{AgentUID: agentUID, State: identity.StateSlot}.Labels()
		}, want: gone},
		{name: "damaged labels", task: runtime.TaskRunning, change: func(f *runtime.Found) { f.Labels[identity.KeyAttempt] = "x" }, want: gone},
		{name: "another id", task: runtime.TaskRunning, change: func(f *runtime.Found) { f.Labels[identity.KeyAttempt] = "7" }, want: gone},
		{name: "damaged record", task: runtime.TaskRunning, change: func(f *runtime.Found) { f.Record = other }, want: gone},
		{name: "damaged record, acknowledged", task: runtime.TaskRunning, started: true, change: func(f *runtime.Found) { f.Record = other }, want: stateRunning},
		{name: "another agent's", task: runtime.TaskCreated, change: func(f *runtime.Found) { f.Labels[identity.KeyAgentUID] = "other" }, want: gone},
	} {
		t.Run(c.name, func(t *testing.T) {
			rt, root := newRuntime(), t.TempDir()
			f := found(t, record("u", 1), c.task)
			if c.change != nil {
				c.change(&f)
			}
			rt.Put(f, runtime.Exit{Code: 9})
			env := boot(t, rt, root, nil)
			_, err := env.logs.Create("u-1", "host")
			require.NoError(t, err)
			if c.started {
				require.NoError(t, env.logs.MarkStarted("u-1", time.Unix(700, 0)))
			}
			require.NoError(t, env.Adopt(t.Context()))
			require.Equal(t, c.want, env.state("u"))
			if c.want == gone {
				require.NoDirExists(t, filepath.Join(root, "u-1"))
				require.Equal(t, c.name == "another agent's", len(rt.IDs()) == 1, "only another agent's container is kept")
				return
			}
			got := env.reports()[0]
			require.Equal(t, "default", got.GetRecord().GetNamespace())
			if c.code != 0 {
				require.Equal(t, c.code, got.GetExitCode())
			}
			if c.started && c.want == stateRunning {
				require.Equal(t, int64(700), got.GetStartTime().GetSeconds())
			}
			if c.want == stateStopped {
				kept, _ := rt.Found("u-1")
				require.NotNil(t, kept.Report, "the exit is durable")
			}
			_, _, err = env.delete(t.Context(), record("u", 1).GetFence(), 0)
			require.NoError(t, err)
			env.requireNothing(t)
		})
	}
}

func TestAdoptKeepsTheNewestAttempt(t *testing.T) {
	rt := newRuntime()
	rt.Put(found(t, record("u", 1), runtime.TaskRunning), runtime.Exit{})
	rt.Put(found(t, record("u", 2), runtime.TaskRunning), runtime.Exit{})
	rt.Put(found(t, record("u", 10), runtime.TaskRunning), runtime.Exit{})
	env := boot(t, rt, t.TempDir(), nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Equal(t, []string{"u-10"}, rt.IDs())
	require.Equal(t, int64(10), env.reports()[0].GetRecord().GetFence().GetAttempt())
}

func TestAdoptCanBeRepeatedAfterError(t *testing.T) {
	rt := newRuntime()
	rt.Put(found(t, record("u", 1), runtime.TaskRunning), runtime.Exit{})
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpList {
			return errors.New("away")
		}
		return nil
	})
	env := boot(t, rt, t.TempDir(), nil)
	require.Error(t, env.Adopt(t.Context()))
	rt.Hook(nil)
	require.NoError(t, env.Adopt(t.Context()))
	require.Equal(t, stateRunning, env.state("u"))
	rt.Exit("u-1", runtime.Exit{Code: 2})
	require.Eventually(t, func() bool { return env.state("u") == stateStopped }, testkit.Timeout, testkit.Tick, "an adopted sandbox is followed")
}

func TestAdoptRemovesOwnLogsOnly(t *testing.T) {
	root := t.TempDir()
	env := boot(t, newRuntime(), root, nil)
	_, err := env.logs.Create("left-1", "h")
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(root, "foreign-1"), 0o700))
	require.NoError(t, os.WriteFile(filepath.Join(root, "foreign-1", "owner"), []byte("other"), 0o600))
	require.NoError(t, env.Adopt(t.Context()))
	require.NoDirExists(t, filepath.Join(root, "left-1"))
	require.DirExists(t, filepath.Join(root, "foreign-1"))
}

func TestSandboxesSurviveRestart(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1))
	require.NoError(t, env.Close(t.Context()))
	_, err := env.create(t.Context(), record("v", 1))
	requireFault(t, err, errdefs.ErrUnavailable, fault.AgentUnavailable)
	next := boot(t, rt, root, nil)
	require.NoError(t, next.Adopt(t.Context()))
	next.SetAccepting(true, "")
	require.Equal(t, stateRunning, next.state("u"))
	report := next.mustCreate(t, record("u", 1))
	require.Equal(t, stateRunning, report.GetState())
	_, err = next.create(t.Context(), record("u", 1, command("other")))
	requireFault(t, err, errdefs.ErrAlreadyExists, fault.SandboxExists)
}
