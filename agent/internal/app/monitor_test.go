package app_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/state"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestSlowContainerdIsNotLost makes containerd answer late, refuse and answer, ping by ping. A watcher receives the refusal
// and the third late answer in a row, and nothing else.
func TestSlowContainerdIsNotLost(t *testing.T) {
	defer goleak.VerifyNone(t)
	late := fmt.Errorf("asking containerd: %w", context.DeadlineExceeded)
	refused := fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd cannot be reached")
	answers := []error{nil, late, late, nil, late, refused, nil, late, late, late, nil}
	require.Equal(t, 3, app.SlowPings)
	rt, clock := fake.New(nil), clocktesting.NewFakeClock(time.Unix(1000, 0))
	var mu sync.Mutex
	pings := 0
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op != fake.OpPing {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		pings++
		if pings > len(answers) {
			return nil
		}
		return answers[pings-1]
	})
	m, hub := newManager(t, rt)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- app.Watch(ctx, rt, m, hub, clock, app.Hooks{}) }()
	require.Eventually(t, m.Accepting, testkit.Timeout, testkit.Tick)
	watcher, err := hub.Watch()
	require.NoError(t, err)
	defer hub.Unwatch(watcher)
	require.Eventually(t, func() bool {
		mu.Lock()
		n := pings
		mu.Unlock()
		if n <= len(answers) && clock.HasWaiters() {
			clock.Step(time.Second)
		}
		return n > len(answers)
	}, testkit.Timeout, testkit.Tick)
	var accepting []bool
	for len(accepting) < 4 {
		d := <-watcher.Deltas()
		require.NotNil(t, d.Accepting)
		accepting = append(accepting, d.GetAccepting())
	}
	require.Equal(t, []bool{false, true, false, true}, accepting)
	stop()
	require.NoError(t, <-done)
	require.NoError(t, m.Close(context.Background()))
	select {
	case d := <-watcher.Deltas():
		require.Nil(t, d)
	default:
	}
}

// newManager returns a manager of sandboxes of a runtime, and the hub that it reports to.
func newManager(t *testing.T, rt *fake.Runtime) (*sandbox.Manager, *status.Hub) {
	t.Helper()
	dir, err := state.Open(t.TempDir())
	require.NoError(t, err)
	tombstones, err := dir.Sub("tombstones")
	require.NoError(t, err)
	hub := status.New(&agentv1.AgentInfo{PodUid: "me"})
	m, err := sandbox.New(sandbox.Config{
		Status:  hub,
		Runtime: rt, Logs: logs.New(logs.Config{Root: t.TempDir(), Owner: "me"}), Info: &agentv1.AgentInfo{PodUid: "me"}, State: dir, Tombstones: tombstones,
	})
	require.NoError(t, err)
	return m, hub
}

// TestUserNamespacesAreReported: what a further try finds reaches those who watch already.
func TestUserNamespacesAreReported(t *testing.T) {
	defer goleak.VerifyNone(t)
	rt, clock := fake.New(nil), clocktesting.NewFakeClock(time.Unix(1000, 0))
	m, hub := newManager(t, rt)
	var on atomic.Bool
	users := func() (bool, string) {
		if on.Load() {
			return true, ""
		}
		return false, "no memory"
	}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- app.Watch(ctx, rt, m, hub, clock, app.Hooks{Users: users}) }()
	require.Eventually(t, m.Accepting, testkit.Timeout, testkit.Tick)
	watcher, err := hub.Watch()
	require.NoError(t, err)
	defer hub.Unwatch(watcher)
	require.Equal(t, "no memory", watcher.Snapshot.GetInfo().GetUserNamespacesOffReason())
	on.Store(true)
	require.Eventually(t, func() bool {
		if clock.HasWaiters() {
			clock.Step(time.Second)
		}
		return hub.Snapshot().GetInfo().GetUserNamespaces()
	}, testkit.Timeout, testkit.Tick)
	info := (<-watcher.Deltas()).GetInfo()
	require.True(t, info.GetUserNamespaces())
	require.Empty(t, info.GetUserNamespacesOffReason())
	require.Equal(t, "me", info.GetPodUid(), "all properties")
	stop()
	require.NoError(t, <-done)
	require.NoError(t, m.Close(context.Background()))
}

// TestNodeThatCannotRunSandboxes: containerd answers, and lacks what new sandboxes need. The agent serves what it has, is ready, and says why it
// accepts none; it accepts some as soon as the node can run them. A containerd that is lost makes it not ready.
func TestNodeThatCannotRunSandboxes(t *testing.T) {
	defer goleak.VerifyNone(t)
	rt, clock := fake.New(nil), clocktesting.NewFakeClock(time.Unix(1000, 0))
	var answer atomic.Pointer[fault.Error]
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if err := answer.Load(); err != nil && op == fake.OpPing {
			return err
		}
		return nil
	})
	answer.Store(fault.New(errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable, "containerd is too old"))
	m, hub := newManager(t, rt)
	var ready atomic.Bool
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- app.Watch(ctx, rt, m, hub, clock, app.Hooks{Ready: ready.Store}) }()
	require.Eventually(t, ready.Load, testkit.Timeout, testkit.Tick)
	watcher, err := hub.Watch()
	require.NoError(t, err, "the sandboxes are adopted")
	hub.Unwatch(watcher)
	require.False(t, watcher.Snapshot.GetAccepting())
	require.Equal(t, "RUNTIME_UNAVAILABLE: containerd is too old", watcher.Snapshot.GetNotAcceptingReason())
	becomes := func(accepting, isReady bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			if clock.HasWaiters() {
				clock.Step(time.Second)
			}
			return m.Accepting() == accepting && ready.Load() == isReady
		}, testkit.Timeout, testkit.Tick)
	}
	answer.Store(nil)
	becomes(true, true)
	answer.Store(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd cannot be reached"))
	becomes(false, false)
	answer.Store(fault.New(errdefs.ErrFailedPrecondition, fault.RuntimeUnavailable, "containerd is too old"))
	becomes(false, true)
	require.Equal(t, "RUNTIME_UNAVAILABLE: containerd is too old", hub.Snapshot().GetNotAcceptingReason())
	stop()
	require.NoError(t, <-done)
	require.NoError(t, m.Close(context.Background()))
}
