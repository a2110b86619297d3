package sandbox_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

const (
	termSent = agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT
	killSent = agentv1.DeleteStage_DELETE_STAGE_SIGKILL_SENT
	removed  = agentv1.DeleteStage_DELETE_STAGE_REMOVED
)

func TestDeleteStages(t *testing.T) {
	for _, c := range []struct {
		name    string
		command []string
		grace   time.Duration
		want    []agentv1.DeleteStage
		code    int32
	}{
		{"ends at SIGTERM", []string{"trap", "exit 7"}, time.Minute, []agentv1.DeleteStage{termSent, removed}, 7},
		{"ignores SIGTERM", []string{"sleep"}, time.Hour, []agentv1.DeleteStage{termSent, killSent, removed}, 137},
		{"lingers after SIGTERM", []string{"trap", "linger"}, 20 * time.Millisecond, []agentv1.DeleteStage{termSent, killSent, removed}, 137},
		{"without grace", []string{"trap", "exit 7"}, 0, []agentv1.DeleteStage{killSent, removed}, 137},
		{"has ended", []string{"exit 4"}, time.Minute, []agentv1.DeleteStage{removed}, 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := newEnv(t, nil)
			env.mustCreate(t, record("u", 1, command(c.command...)))
			if c.name == "has ended" {
				require.Eventually(t, func() bool { return env.state("u") == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, testkit.Timeout, testkit.Tick)
			}
			stages, code, err := env.delete(t.Context(), record("u", 1).GetFence(), c.grace)
			require.NoError(t, err)
			require.Equal(t, c.want, stages)
			require.Equal(t, c.code, *code)
			env.requireNothing(t)
			stages, _, err = env.delete(t.Context(), record("u", 1).GetFence(), 0)
			require.NoError(t, err)
			require.Equal(t, []agentv1.DeleteStage{removed}, stages)
		})
	}
}

func TestDeleteUsesSpecGracePeriod(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1, command("trap", "linger"), grace(10*time.Millisecond)))
	var stages []agentv1.DeleteStage
	_, err := env.Delete(t.Context(), &agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence()}, func(s agentv1.DeleteStage) { stages = append(stages, s) })
	require.NoError(t, err)
	require.Equal(t, []agentv1.DeleteStage{termSent, killSent, removed}, stages)
}

func TestDeleteContinuesWhenCallerLeaves(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1, command("trap", "linger")))
	ctx, cancel := context.WithCancel(t.Context())
	hour := &agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence(), GracePeriod: durationpb.New(time.Hour)}
	_, err := env.Delete(ctx, hour, func(agentv1.DeleteStage) { cancel() })
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATING, env.state("u"))
	stages, _, err := env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.Equal(t, []agentv1.DeleteStage{termSent, killSent, removed}, stages)
	env.requireNothing(t)
}

func TestDeleteFences(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 2))
	other := record("u", 2).GetFence()
	other.AgentUid = "other"
	_, _, err := env.delete(t.Context(), other, 0)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	_, _, err = env.delete(t.Context(), record("u", 3).GetFence(), 0)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	stages, _, err := env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.Equal(t, []agentv1.DeleteStage{removed}, stages, "an older attempt does not exist")
	require.Equal(t, []string{"u-2"}, env.runtime.IDs())
}

func TestDeletedAttemptsExpire(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	env := newEnv(t, func(c *sandbox.Config) { c.Clock = clock })
	_, _, err := env.delete(t.Context(), record("u", 2).GetFence(), 0)
	require.NoError(t, err)
	_, err = env.create(t.Context(), record("u", 2))
	requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
	_, err = env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	clock.Step(2 * time.Hour)
	env.mustCreate(t, record("u", 2))
}

func TestNewerAttemptWaitsForOlder(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1))
	deleting, release := make(chan struct{}), make(chan struct{})
	steps := make(chan string, 10)
	env.runtime.Hook(func(_ context.Context, op fake.Op, id string) error {
		switch {
		case op == fake.OpDelete && id == "u-1":
			close(deleting)
			<-release
			steps <- "delete u-1"
		case op == fake.OpCreate:
			steps <- "create " + id
		}
		return nil
	})
	deleted := make(chan error, 1)
	go func() { _, _, err := env.delete(context.Background(), record("u", 1).GetFence(), 0); deleted <- err }()
	<-deleting
	created := make(chan error, 1)
	go func() { _, err := env.create(context.Background(), record("u", 2)); created <- err }()
	close(release)
	require.NoError(t, <-deleted)
	require.NoError(t, <-created)
	require.Equal(t, "delete u-1", <-steps)
	require.Equal(t, "create u-2", <-steps)
	require.Equal(t, []string{"u-2"}, env.runtime.IDs())
}

func TestDeleteReportsFailureAndRetries(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1))
	var away atomic.Bool
	away.Store(true)
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpDelete && away.Load() {
			return errors.New("containerd is away")
		}
		return nil
	})
	_, _, err := env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.ErrorContains(t, err, "containerd is away")
	away.Store(false)
	require.Eventually(t, func() bool { return len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
	env.requireNothing(t)
}

func TestExitIsReportedAndKept(t *testing.T) {
	for _, c := range []struct {
		name   string
		exit   runtime.Exit
		reason string
	}{
		{"completed", runtime.Exit{}, "Completed"},
		{"error", runtime.Exit{Code: 3}, "Error"},
		{"out of memory", runtime.Exit{Code: 137, OOMKilled: true}, "OOMKilled"},
		{"killed", runtime.Exit{Code: 137}, "Error"},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := newEnv(t, nil)
			env.mustCreate(t, record("u", 1))
			env.runtime.Exit("u-1", c.exit)
			require.Eventually(t, func() bool { return env.state("u") == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, testkit.Timeout, testkit.Tick)
			report := env.reports()[0]
			require.Equal(t, c.exit.Code, report.GetExitCode())
			require.Equal(t, c.reason, report.GetReason())
			f, _ := env.runtime.Found("u-1")
			require.Equal(t, runtime.TaskNone, f.Task)
			require.NotNil(t, f.Report)
			_, ended, err := env.Log(t.Context(), record("u", 1).GetFence())
			require.NoError(t, err)
			<-ended
		})
	}
}

func TestExitIsSeenAcrossRuntimeOutage(t *testing.T) {
	env := newEnv(t, nil)
	var waits atomic.Int32
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpWait && waits.Add(1) <= 2 {
			return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "away")
		}
		return nil
	})
	env.mustCreate(t, record("u", 1, command("exit 5")))
	require.Eventually(t, func() bool { return env.state("u") == agentv1.SandboxState_SANDBOX_STATE_STOPPED }, testkit.Timeout, testkit.Tick)
	require.Equal(t, int32(5), env.reports()[0].GetExitCode())
}

func TestMarkPersisted(t *testing.T) {
	env := newEnv(t, nil)
	requireFault(t, env.MarkPersisted(t.Context(), record("u", 1).GetFence()), errdefs.ErrNotFound, fault.SandboxNotFound)
	env.mustCreate(t, record("u", 1))
	requireFault(t, env.MarkPersisted(t.Context(), record("u", 2).GetFence()), errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	for range 2 {
		require.NoError(t, env.MarkPersisted(t.Context(), record("u", 1).GetFence()))
	}
	f, _ := env.runtime.Found("u-1")
	require.Equal(t, "true", f.Labels["fast-sandbox.io/persisted"])
	require.True(t, env.reports()[0].GetPersisted())
}
