package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
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
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	me       = "pod-uid"
	patience = 10 * time.Second
	tick     = 2 * time.Millisecond
)

// world is a manager with its fake runtime and its logs.
type world struct {
	*sandbox.Manager

	runtime *fake.Runtime
	logs    *logs.Store
	root    string
}

func newRuntime() *fake.Runtime {
	return fake.New(map[string]fake.Image{"docker.io/library/busybox:1": {Local: true}})
}

// newWorld is adopted and accepting unless change says otherwise.
func newWorld(t *testing.T, change func(*sandbox.Config)) *world {
	t.Helper()
	w := boot(t, newRuntime(), t.TempDir(), change)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	return w
}

func boot(t *testing.T, rt *fake.Runtime, root string, change func(*sandbox.Config)) *world {
	t.Helper()
	cfg := sandbox.Config{Runtime: rt, Logs: logs.New(logs.Config{Root: root, Owner: me}), Info: &agentv1.AgentInfo{
		PodUid: me, PodName: "agent", Pool: "default", PodIp: "10.0.0.9", Capacity: 3, ReservedPorts: []int32{5758},
	}}
	if change != nil {
		change(&cfg)
	}
	if cfg.State == nil {
		cfg.State, cfg.Tombstones = openState(t, root+".state")
	}
	m, err := sandbox.New(cfg)
	require.NoError(t, err)
	w := &world{Manager: m, runtime: rt, logs: cfg.Logs, root: root}
	t.Cleanup(func() {
		rt.Hook(nil)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		require.NoError(t, w.Close(ctx))
	})
	return w
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
		Fence:     &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: me},
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

func (w *world) create(ctx context.Context, r *agentv1.SandboxRecord) (*agentv1.SandboxReport, error) {
	return w.Create(ctx, r, false, func(sandbox.StageTiming) {})
}

func (w *world) mustCreate(t *testing.T, r *agentv1.SandboxRecord) *agentv1.SandboxReport {
	t.Helper()
	report, err := w.create(t.Context(), r)
	require.NoError(t, err)
	return report
}

func (w *world) delete(ctx context.Context, f *agentv1.Fence, grace time.Duration) ([]agentv1.DeleteStage, *int32, error) {
	var stages []agentv1.DeleteStage
	code, err := w.Delete(ctx, &agentv1.DeleteSandboxRequest{Fence: f, GracePeriod: durationpb.New(grace)}, func(s agentv1.DeleteStage) { stages = append(stages, s) })
	return stages, code, err
}

func (w *world) state(uid string) agentv1.SandboxState {
	for _, r := range w.Reports() {
		if r.GetRecord().GetFence().GetSandboxUid() == uid {
			return r.GetState()
		}
	}
	return agentv1.SandboxState_SANDBOX_STATE_UNSPECIFIED
}

// requireNothing checks that no container, no log and no report is left.
func (w *world) requireNothing(t *testing.T) {
	t.Helper()
	require.Empty(t, w.runtime.IDs())
	require.Empty(t, w.Reports())
	left, err := os.ReadDir(w.root)
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

func TestCreateTellsEachStage(t *testing.T) {
	w := newWorld(t, nil)
	var stages []agentv1.CreateStage
	report, err := w.Create(t.Context(), record("u", 1, ports(80)), false, func(s sandbox.StageTiming) { stages = append(stages, s.Stage) })
	require.NoError(t, err)
	require.Equal(t, []agentv1.CreateStage{1, 2, 3, 4, 5, 6}, stages)
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, report.GetState())
	require.Equal(t, "u-1", report.GetContainerId())
	require.Equal(t, []string{"10.0.0.9:80"}, report.GetEndpoints())
	require.NotNil(t, report.GetStartTime())
	f, ok := w.runtime.Found("u-1")
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
		{"taken port", record("n", 1, ports(81, 80)), errdefs.ErrResourceExhausted, fault.PortConflict},
		{"bad image", record("n", 1, func(r *agentv1.SandboxRecord) { r.Spec.Image = "Not A Reference" }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"zero byte", record("n", 1, command("a\x00b")), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"zero byte in env", record("n", 1, func(r *agentv1.SandboxRecord) { r.Spec.Env = map[string]string{"A": "\x00"} }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"ports without a network", record("n", 1, ports(99), func(r *agentv1.SandboxRecord) { r.Spec.Network = sandboxv1.NetworkMode_NETWORK_MODE_NONE }), errdefs.ErrInvalidArgument, fault.InvalidField},
		{"too little memory", record("n", 1, func(r *agentv1.SandboxRecord) { r.Limits = &sandboxv1.ResourceLimits{MemoryBytes: 1} }), errdefs.ErrInvalidArgument, fault.InvalidField},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, nil)
			w.mustCreate(t, record("a", 2, ports(80)))
			_, err := w.create(t.Context(), c.record)
			requireFault(t, err, c.class, c.reason)
			require.Equal(t, []string{"a-2"}, w.runtime.IDs())
			require.True(t, w.Accepting(), "a bad request makes no bad agent")
		})
	}
}

func TestCapacity(t *testing.T) {
	w := newWorld(t, nil)
	for i := range 3 {
		w.mustCreate(t, record(fmt.Sprint("u", i), 1))
	}
	_, err := w.create(t.Context(), record("n", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	_, retry := fault.RetryAfter(err)
	require.True(t, retry)
	_, _, err = w.delete(t.Context(), record("u0", 1).GetFence(), 0)
	require.NoError(t, err)
	w.mustCreate(t, record("n", 1))
}

func TestNotReadyAndNotAccepting(t *testing.T) {
	w := boot(t, newRuntime(), t.TempDir(), nil)
	_, err := w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	_, err = w.Watch()
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	_, _, err = w.delete(t.Context(), record("u", 1).GetFence(), 0)
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	require.NoError(t, w.Adopt(t.Context()))
	_, err = w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable)
	w.SetAccepting(true, "")
	w.mustCreate(t, record("u", 1))
	w.SetAccepting(false, "gone")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_RUNNING, w.state("u"), "sandboxes go on")
	report := w.mustCreate(t, record("u", 1))
	require.Equal(t, "u-1", report.GetContainerId(), "what is there is answered")
}

func TestSameFenceTwiceAtOnceIsOneSandbox(t *testing.T) {
	w := newWorld(t, nil)
	var tasks atomic.Int32
	release := make(chan struct{})
	w.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
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
			report, err := w.create(context.Background(), r)
			require.NoError(t, err)
			reports[i] = report
		})
	}
	require.Eventually(t, func() bool { return tasks.Load() == 1 }, patience, tick)
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
			w := newWorld(t, nil)
			entered, release := make(chan struct{}), make(chan struct{})
			w.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
				if at == op {
					close(entered)
					<-release // containerd finishes what it has begun
				}
				return nil
			})
			created := make(chan error, 1)
			go func() { _, err := w.create(context.Background(), record("u", 1)); created <- err }()
			<-entered
			deleted := make(chan error, 1)
			go func() {
				stages, _, err := w.delete(context.Background(), record("u", 1).GetFence(), time.Minute)
				if err == nil && stages[len(stages)-1] != agentv1.DeleteStage_DELETE_STAGE_REMOVED {
					err = fmt.Errorf("stages %v", stages)
				}
				deleted <- err
			}()
			require.Eventually(t, func() bool { return w.state("u") == agentv1.SandboxState_SANDBOX_STATE_TERMINATING }, patience, tick)
			_, err := w.create(t.Context(), record("u", 1))
			requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
			close(release)
			requireFault(t, <-created, errdefs.ErrAborted, fault.SandboxTerminating)
			require.NoError(t, <-deleted)
			w.requireNothing(t)
			w.runtime.Hook(nil)
			_, err = w.create(t.Context(), record("u", 1))
			requireFault(t, err, errdefs.ErrAborted, fault.SandboxTerminating)
			w.mustCreate(t, record("u", 2))
		})
	}
}

func TestCallersThatLeave(t *testing.T) {
	w := newWorld(t, nil)
	entered := make(chan struct{}, 8)
	w.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
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
	go func() { _, err := w.create(first, record("u", 1)); done <- err }()
	<-entered
	joined := make(chan struct{})
	go func() {
		_, err := w.Create(second, record("u", 1), false, func(s sandbox.StageTiming) {
			if s.Stage == agentv1.CreateStage_CREATE_STAGE_IMAGE {
				close(joined)
			}
		})
		done <- err
	}()
	<-joined
	leaveFirst()
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_CREATING, w.state("u"), "the other one still wants it")
	leaveSecond()
	require.ErrorIs(t, <-done, context.Canceled)
	require.ErrorIs(t, <-done, context.Canceled)
	require.Eventually(t, func() bool { return len(w.Reports()) == 0 }, patience, tick)
	w.requireNothing(t)
	w.runtime.Hook(nil)
	w.mustCreate(t, record("u", 1)) // no tombstone: nobody deleted it
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	boom := fault.New(errdefs.ErrFailedPrecondition, fault.CommandNotFound, "boom")
	for _, op := range []fake.Op{fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(op), func(t *testing.T) {
			w := newWorld(t, nil)
			w.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
				if at == op {
					return boom
				}
				return nil
			})
			_, err := w.create(t.Context(), record("u", 1))
			require.ErrorIs(t, err, boom)
			w.requireNothing(t)
			w.runtime.Hook(nil)
			w.mustCreate(t, record("u", 1))
		})
	}
}

func TestCleanupIsTriedUntilItSucceeds(t *testing.T) {
	w := newWorld(t, nil)
	var failures atomic.Int32
	w.runtime.Hook(func(_ context.Context, op fake.Op, _ string) error {
		switch {
		case op == fake.OpStart:
			return errors.New("no start")
		case op == fake.OpDelete && failures.Add(1) <= 2:
			return errors.New("containerd is away")
		}
		return nil
	})
	_, err := w.create(t.Context(), record("u", 1))
	require.ErrorContains(t, err, "no start")
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, w.state("u"), "its place is taken until it is clean")
	require.Eventually(t, func() bool { return len(w.Reports()) == 0 }, patience, tick)
	w.requireNothing(t)
}

func TestForeignContainerIsLeftAlone(t *testing.T) {
	w := newWorld(t, nil)
	w.runtime.Put(runtime.Found{ID: "u-1", Task: runtime.TaskRunning}, runtime.Exit{})
	_, err := w.create(t.Context(), record("u", 1))
	requireFault(t, err, errdefs.ErrAlreadyExists, fault.SandboxExists)
	require.Equal(t, []string{"u-1"}, w.runtime.IDs())
	require.Empty(t, w.Reports())
}

func TestCreateTimeout(t *testing.T) {
	w := newWorld(t, func(c *sandbox.Config) { c.CreateTimeout = 20 * time.Millisecond })
	w.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op == fake.OpCreate {
			<-ctx.Done()
			return ctx.Err()
		}
		return nil
	})
	_, err := w.create(t.Context(), record("u", 1))
	requireFault(t, err, context.DeadlineExceeded, fault.DeadlineExceeded)
	w.requireNothing(t)
}

func TestManyCreatesAndDeletesLeaveNothing(t *testing.T) {
	w := newWorld(t, func(c *sandbox.Config) { c.Info.Capacity = 8 })
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 20 {
				r := record(fmt.Sprintf("u%d-%d", worker, i), 1)
				ctx, cancel := context.WithCancel(context.Background())
				created := make(chan struct{})
				go func() { defer close(created); _, _ = w.create(ctx, r) }()
				if i%3 == 0 {
					cancel()
				}
				_, _, err := w.delete(context.Background(), r.GetFence(), 0)
				if err != nil {
					t.Errorf("deleting: %v", err)
				}
				<-created
				cancel()
				_, _, err = w.delete(context.Background(), r.GetFence(), 0)
				if err != nil {
					t.Errorf("deleting again: %v", err)
				}
			}
		})
	}
	wg.Wait()
	w.requireNothing(t)
}

func grace(d time.Duration) func(*agentv1.SandboxRecord) {
	return func(r *agentv1.SandboxRecord) { r.Spec.TerminationGracePeriod = durationpb.New(d) }
}
