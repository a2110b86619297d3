package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agentUID is the uid of the agent under test.
const agentUID = "pod-uid"

// testEnv is a manager with its fake runtime, its logs and its status.
type testEnv struct {
	*sandbox.Manager

	status  *status.Hub
	runtime *fake.Runtime
	logs    *logs.Store
	root    string
}

func newRuntime() *fake.Runtime {
	return fake.New(map[string]fake.Image{"docker.io/library/busybox:1": {Local: true}})
}

// newEnv returns a manager that has adopted and accepts sandboxes.
func newEnv(t *testing.T, change func(*sandbox.Config)) *testEnv {
	t.Helper()
	env := boot(t, newRuntime(), t.TempDir(), change)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	return env
}

func boot(t *testing.T, rt *fake.Runtime, root string, change func(*sandbox.Config)) *testEnv {
	t.Helper()
	cfg := sandbox.Config{Runtime: rt, Logs: logs.New(logs.Config{Root: root, Owner: agentUID}), Info: &agentv1.AgentInfo{
		PodUid: agentUID, PodName: "agent", Namespace: "default", Pool: "default", PodIp: "10.0.0.9", Capacity: 3, ReservedPorts: []int32{5758},
	}}
	if change != nil {
		change(&cfg)
	}
	if cfg.State == nil {
		cfg.State, cfg.Tombstones = openState(t, root+".state")
	}
	cfg.Status = status.New(cfg.Info)
	m, err := sandbox.New(cfg)
	require.NoError(t, err)
	env := &testEnv{Manager: m, status: cfg.Status, runtime: rt, logs: cfg.Logs, root: root}
	t.Cleanup(func() {
		rt.Hook(nil)
		ctx, cancel := context.WithTimeout(context.Background(), testkit.Timeout)
		defer cancel()
		require.NoError(t, env.Close(ctx))
	})
	return env
}

func openState(t *testing.T, path string) (dir, tombstones *state.Dir) {
	t.Helper()
	dir, err := state.Open(path)
	require.NoError(t, err)
	tombstones, err = dir.Sub("tombstones")
	require.NoError(t, err)
	return dir, tombstones
}

func record(uid string, attempt int64, change ...func(*agentv1.SandboxRecord)) *agentv1.SandboxRecord {
	r := &agentv1.SandboxRecord{
		Fence:     &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: agentUID},
		Namespace: "default", Name: "sb-" + uid,
		Spec: &sandboxv1.SandboxSpec{Image: "busybox:1", Pool: "default", Command: []string{"sleep"}},
	}
	for _, c := range change {
		c(r)
	}
	return r
}

func command(c ...string) func(*agentv1.SandboxRecord) {
	return func(r *agentv1.SandboxRecord) { r.Spec.Command = c }
}

func ports(p ...int32) func(*agentv1.SandboxRecord) {
	return func(r *agentv1.SandboxRecord) { r.Spec.Ports = p }
}

func (env *testEnv) create(ctx context.Context, r *agentv1.SandboxRecord) (*agentv1.SandboxReport, error) {
	return env.Create(ctx, r, false, func(sandbox.StageTiming) {})
}

func (env *testEnv) mustCreate(t *testing.T, r *agentv1.SandboxRecord) *agentv1.SandboxReport {
	t.Helper()
	report, err := env.create(t.Context(), r)
	require.NoError(t, err)
	return report
}

func (env *testEnv) delete(ctx context.Context, f *agentv1.Fence, grace time.Duration) ([]agentv1.DeleteStage, *int32, error) {
	var stages []agentv1.DeleteStage
	code, err := env.Delete(ctx, &agentv1.DeleteSandboxRequest{Fence: f, GracePeriod: durationpb.New(grace)}, func(s agentv1.DeleteStage) { stages = append(stages, s) })
	return stages, code, err
}

func (env *testEnv) reports() []*agentv1.SandboxReport { return env.status.Snapshot().GetSandboxes() }

func (env *testEnv) state(uid string) agentv1.SandboxState {
	for _, r := range env.reports() {
		if r.GetRecord().GetFence().GetSandboxUid() == uid {
			return r.GetState()
		}
	}
	return agentv1.SandboxState_SANDBOX_STATE_UNSPECIFIED
}

// requireNothing checks that no container, no log and no report is left.
func (env *testEnv) requireNothing(t *testing.T) {
	t.Helper()
	require.Empty(t, env.runtime.IDs())
	require.Empty(t, env.reports())
	left, err := os.ReadDir(env.root)
	if !errors.Is(err, os.ErrNotExist) {
		require.NoError(t, err)
	}
	require.Empty(t, left)
}

func requireFault(t *testing.T, err, class error, reason fault.Reason) {
	t.Helper()
	require.ErrorIs(t, err, class)
	require.Equal(t, reason, fault.ReasonOf(err), "%v", err)
}

func TestCreateReportsEachStage(t *testing.T) {
	env := newEnv(t, nil)
	var stages []agentv1.CreateStage
	report, err := env.Create(t.Context(), record("u", 1, ports(80)), false, func(s sandbox.StageTiming) { stages = append(stages, s.Stage) })
	require.NoError(t, err)
	require.Equal(t, []agentv1.CreateStage{1, 2, 3, 4, 5, 6}, stages)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, report.GetState())
	require.Equal(t, "u-1", report.GetContainerId())
	require.Equal(t, []string{"10.0.0.9:80"}, report.GetEndpoints())
	require.NotNil(t, report.GetStartTime())
	f, ok := env.runtime.Found("u-1")
	require.True(t, ok)
	require.Equal(t, "claimed", f.Labels["fast-sandbox.io/state"])
	require.Empty(t, f.Labels["fast-sandbox.io/persisted"])
}

func TestAdmission(t *testing.T) {
	for _, c := range []struct {
		name   string
		record *agentv1.SandboxRecord
		class  error
		reason fault.Reason
	}{
		{"another agent", record("n", 1, func(r *agentv1.SandboxRecord) { r.Fence.AgentUid = "other" }), errdefs.ErrFailedPrecondition, fault.FenceMismatch},
		{"older attempt", record("a", 1), errdefs.ErrFailedPrecondition, fault.FenceMismatch},
		{"newer attempt", record("a", 3), errdefs.ErrFailedPrecondition, fault.FenceMismatch},
		{"same fence, another record", record("a", 2, command("other")), errdefs.ErrAlreadyExists, fault.SandboxExists},
		{"reserved port", record("n", 1, ports(5758)), errdefs.ErrResourceExhausted, fault.PortConflict},
		{"port in use", record("n", 1, ports(81, 80)), errdefs.ErrResourceExhausted, fault.PortConflict},
		{"bad image", record("n", 1, func(r *agentv1.SandboxRecord) { r.Spec.Image = "Not A Reference" }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"zero byte", record("n", 1, command("a\x00b")), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"zero byte in env", record("n", 1, func(r *agentv1.SandboxRecord) { r.Spec.Env = map[string]string{"A": "\x00"} }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"ports without a network", record("n", 1, ports(99), func(r *agentv1.SandboxRecord) { r.Spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"above the pool's maximum", record("n", 1, func(r *agentv1.SandboxRecord) { r.Limits = &sandboxv1.ResourceLimits{Pids: 101} }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"too little memory", record("n", 1, func(r *agentv1.SandboxRecord) { r.Limits = &sandboxv1.ResourceLimits{MemoryBytes: 1} }), errdefs.ErrInvalidArgument, fault.InvalidField},
	} {
		t.Run(c.name, func(t *testing.T) {
			env := newEnv(t, func(c *sandbox.Config) { c.MaxLimits = resources.Limits{PIDs: 100} })
			env.mustCreate(t, record("a", 2, ports(80)))
			_, err := env.create(t.Context(), c.record)
			requireFault(t, err, c.class, c.reason)
			require.Equal(t, []string{"a-2"}, env.runtime.IDs())
			require.True(t, env.Accepting(), "an invalid request does not stop the agent")
		})
	}
}

func TestCapacity(t *testing.T) {
	env := newEnv(t, nil)
	for i := range 3 {
		env.mustCreate(t, record(fmt.Sprint("u", i), 1))
	}
	_, err := env.create(t.Context(), record("n", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	_, retry := fault.RetryAfter(err)
	require.True(t, retry)
	_, _, err = env.delete(t.Context(), record("u0", 1).GetFence(), 0)
	require.NoError(t, err)
	env.mustCreate(t, record("n", 1))
}

func TestNotReadyAndNotAccepting(t *testing.T) {
	env := boot(t, newRuntime(), t.TempDir(), nil)
	_, err := env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	_, err = env.status.Watch()
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	_, _, err = env.delete(t.Context(), record("u", 1).GetFence(), 0)
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	require.NoError(t, env.Adopt(t.Context()))
	_, err = env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1))
	env.SetAccepting(false, "gone")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, env.state("u"), "sandboxes run on")
	report := env.mustCreate(t, record("u", 1))
	require.Equal(t, "u-1", report.GetContainerId(), "an existing sandbox is returned")
}

func TestConcurrentCreatesShareOneSandbox(t *testing.T) {
	env := newEnv(t, nil)
	var tasks atomic.Int32
	release := make(chan struct{})
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpTask {
			tasks.Add(1)
			<-release
		}
		return nil
	})
	var wg sync.WaitGroup
	reports := make([]*agentv1.SandboxReport, 8)
	for i := range reports {
		wg.Go(func() {
			r := record("u", 1)
			r.Traceparent = fmt.Sprint("another trace ", i)
			report, err := env.create(context.Background(), r)
			require.NoError(t, err)
			reports[i] = report
		})
	}
	require.Eventually(t, func() bool { return tasks.Load() == 1 }, testkit.Timeout, testkit.Tick)
	close(release)
	wg.Wait()
	require.Equal(t, int32(1), tasks.Load())
	for _, r := range reports {
		require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, r.GetState())
	}
}

func TestDeleteDuringCreate(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(op), func(t *testing.T) {
			env := newEnv(t, nil)
			entered, release := make(chan struct{}), make(chan struct{})
			env.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
				if at == op {
					close(entered)
					<-release // containerd completes a call that was sent
				}
				return nil
			})
			created := make(chan error, 1)
			go func() { _, err := env.create(context.Background(), record("u", 1)); created <- err }()
			<-entered
			deleted := make(chan error, 1)
			go func() {
				stages, _, err := env.delete(context.Background(), record("u", 1).GetFence(), time.Minute)
				if err == nil && stages[len(stages)-1] != agentv1.DeleteStage_DELETE_STAGE_REMOVED {
					err = fmt.Errorf("stages %v", stages)
				}
				deleted <- err
			}()
			require.Eventually(t, func() bool { return env.state("u") == agentv1.SandboxState_SANDBOX_STATE_TERMINATING }, testkit.Timeout, testkit.Tick)
			_, err := env.create(t.Context(), record("u", 1))
			requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
			close(release)
			requireFault(t, <-created, errdefs.ErrAborted, fault.SandboxTerminating)
			require.NoError(t, <-deleted)
			env.requireNothing(t)
			env.runtime.Hook(nil)
			_, err = env.create(t.Context(), record("u", 1))
			requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
			env.mustCreate(t, record("u", 2))
		})
	}
}

func TestCreateIsCanceledWhenAllCallersLeave(t *testing.T) {
	env := newEnv(t, nil)
	entered := make(chan struct{}, 8)
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op != fake.OpCreate {
			return nil
		}
		entered <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	})
	first, leaveFirst := context.WithCancel(t.Context())
	second, leaveSecond := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { _, err := env.create(first, record("u", 1)); done <- err }()
	<-entered
	joined := make(chan struct{})
	go func() {
		_, err := env.Create(second, record("u", 1), false, func(s sandbox.StageTiming) {
			if s.Stage == agentv1.CreateStage_CREATE_STAGE_IMAGE {
				close(joined)
			}
		})
		done <- err
	}()
	<-joined
	leaveFirst()
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_CREATING, env.state("u"), "the other caller still waits")
	leaveSecond()
	require.ErrorIs(t, <-done, context.Canceled)
	require.ErrorIs(t, <-done, context.Canceled)
	require.Eventually(t, func() bool { return len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
	env.requireNothing(t)
	env.runtime.Hook(nil)
	env.mustCreate(t, record("u", 1)) // there is no tombstone: it was not deleted
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	boom := fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "boom")
	for _, op := range []fake.Op{fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(op), func(t *testing.T) {
			env := newEnv(t, nil)
			env.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
				if at == op {
					return boom
				}
				return nil
			})
			_, err := env.create(t.Context(), record("u", 1))
			require.ErrorIs(t, err, boom)
			env.requireNothing(t)
			env.runtime.Hook(nil)
			env.mustCreate(t, record("u", 1))
		})
	}
}

func TestCleanupIsRetried(t *testing.T) {
	env := newEnv(t, nil)
	var failures atomic.Int32
	env.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		switch {
		case op == fake.OpStart:
			return errors.New("no start")
		case op == fake.OpDelete && failures.Add(1) <= 2:
			return errors.New("containerd is away")
		}
		return nil
	})
	_, err := env.create(t.Context(), record("u", 1))
	require.ErrorContains(t, err, "no start")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, env.state("u"), "it holds its capacity until it is cleaned up")
	require.Eventually(t, func() bool { return len(env.reports()) == 0 }, testkit.Timeout, testkit.Tick)
	env.requireNothing(t)
}

func TestForeignContainerIsKept(t *testing.T) {
	env := newEnv(t, nil)
	env.runtime.Put(runtime.Found{ID: "u-1", Task: runtime.TaskRunning}, runtime.Exit{})
	_, err := env.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAlreadyExists, fault.SandboxExists)
	require.Equal(t, []string{"u-1"}, env.runtime.IDs())
	require.Empty(t, env.reports())
}

func TestCreateTimeout(t *testing.T) {
	env := newEnv(t, func(c *sandbox.Config) { c.CreateTimeout = 20 * time.Millisecond })
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpCreate {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	_, err := env.create(t.Context(), record("u", 1))
	requireFault(t, err, context.DeadlineExceeded, fault.DeadlineExceeded)
	env.requireNothing(t)
}

func TestManyCreatesAndDeletesLeaveNothing(t *testing.T) {
	env := newEnv(t, func(c *sandbox.Config) { c.Info.Capacity = 8 })
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 20 {
				r := record(fmt.Sprintf("u%d-%d", worker, i), 1)
				ctx, cancel := context.WithCancel(context.Background())
				created := make(chan struct{})
				go func() { defer close(created); _, _ = env.create(ctx, r) }()
				if i%3 == 0 {
					cancel()
				}
				_, _, err := env.delete(context.Background(), r.GetFence(), 0)
				if err != nil {
					t.Errorf("deleting: %v", err)
				}
				<-created
				cancel()
				_, _, err = env.delete(context.Background(), r.GetFence(), 0)
				if err != nil {
					t.Errorf("deleting again: %v", err)
				}
			}
		})
	}
	wg.Wait()
	env.requireNothing(t)
}

func grace(d time.Duration) func(*agentv1.SandboxRecord) {
	return func(r *agentv1.SandboxRecord) { r.Spec.TerminationGracePeriod = durationpb.New(d) }
}

// failing returns a hook that fails some calls.
func failing(ops ...fake.Op) func(context.Context, fake.Op, string) error {
	return func(_ context.Context, op fake.Op, _ string) error {
		if slices.Contains(ops, op) {
			return errAway
		}
		return nil
	}
}
