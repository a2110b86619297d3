package conflict_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/conflict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	window = 5 * time.Second
	period = 10 * time.Minute
	read   = 500 * time.Millisecond
)

// fixture is a checker whose check runs in the background, on a fake clock.
type fixture struct {
	client  *fake.Clientset
	clock   *clocktesting.FakeClock
	checker *conflict.Checker
	cancel  context.CancelFunc
	done    chan error

	mu     sync.Mutex
	failed []error
}

func newFixture(t *testing.T, run func(context.Context, *fixture) error) *fixture {
	t.Helper()
	f := &fixture{client: fake.NewClientset(), clock: clocktesting.NewFakeClock(time.Unix(1_700_000_000, 0)), done: make(chan error, 1)}
	f.checker = conflict.New(conflict.Config{Client: f.client, Namespace: "ns", Window: window, Period: period, Clock: f.clock})
	ctx, cancel := context.WithCancel(t.Context())
	f.cancel = cancel
	t.Cleanup(cancel)
	go func() { f.done <- run(ctx, f) }()
	return f
}

func startCheck(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t, func(ctx context.Context, f *fixture) error { return f.checker.Check(ctx) })
	f.await(t, 2) // the ticker and the timer of the check
	return f
}

// await waits until the code under test waits for the clock with that many timers and tickers. A stopped ticker of a FakeClock
// still counts.
func (f *fixture) await(t *testing.T, waiters int) {
	t.Helper()
	require.Eventually(t, func() bool { return f.clock.Waiters() == waiters }, testkit.Timeout, testkit.Tick)
}

func (f *fixture) canaries(t *testing.T) []corev1.ConfigMap {
	t.Helper()
	list, err := f.client.CoreV1().ConfigMaps("ns").List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	return list.Items
}

// deleteCanary does what another collector does.
func (f *fixture) deleteCanary(t *testing.T) {
	t.Helper()
	all := f.canaries(t)
	require.Len(t, all, 1)
	require.NoError(t, f.client.CoreV1().ConfigMaps("ns").Delete(t.Context(), all[0].Name, metav1.DeleteOptions{}))
}

func TestCheckFindsNoCollector(t *testing.T) {
	f := startCheck(t)
	all := f.canaries(t)
	require.Len(t, all, 1)
	require.Len(t, all[0].OwnerReferences, 1)
	f.clock.Step(window)
	require.NoError(t, <-f.done)
	require.Empty(t, f.canaries(t))
}

func TestCheckFindsCollector(t *testing.T) {
	f := startCheck(t)
	f.deleteCanary(t)
	f.clock.Step(read)
	require.ErrorIs(t, <-f.done, conflict.ErrFound)
}

func TestCheckFindsCollectorAtTheEndOfTheWindow(t *testing.T) {
	f := startCheck(t)
	f.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, &corev1.ConfigMap{}, nil
	})
	f.deleteCanary(t)
	f.clock.Step(window)
	require.ErrorIs(t, <-f.done, conflict.ErrFound)
}

func TestCheckDeletesCanaryAfterFailure(t *testing.T) {
	unavailable := errors.New("unavailable")
	f := startCheck(t)
	f.client.PrependReactor("get", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) { return true, nil, unavailable })
	f.clock.Step(read)
	require.ErrorIs(t, <-f.done, unavailable)
	require.Empty(t, f.canaries(t))

	f = startCheck(t)
	f.cancel()
	require.ErrorIs(t, <-f.done, context.Canceled)
	require.Empty(t, f.canaries(t))
}

func TestSparesOnlyThePresentCanary(t *testing.T) {
	f := startCheck(t)
	name := f.canaries(t)[0].Name
	require.True(t, f.checker.Spares("ConfigMap", "ns", name))
	require.False(t, f.checker.Spares("ConfigMap", "other", name))
	require.False(t, f.checker.Spares("Secret", "ns", name))
	require.False(t, f.checker.Spares("ConfigMap", "ns", name+"x"))
	require.False(t, f.checker.Spares("ConfigMap", "ns", ""))
	f.clock.Step(window)
	require.NoError(t, <-f.done)
	require.False(t, f.checker.Spares("ConfigMap", "ns", name), "a canary that was left behind is garbage")
}

// TestSparesBeforeCreateReturns: a watch can show the canary before its creator knows that it exists.
func TestSparesBeforeCreateReturns(t *testing.T) {
	var f *fixture
	spared := make(chan bool, 1)
	ready := make(chan struct{})
	f = newFixture(t, func(ctx context.Context, f *fixture) error {
		<-ready
		return f.checker.Check(ctx)
	})
	f.client.PrependReactor("create", "configmaps", func(a k8stesting.Action) (bool, runtime.Object, error) {
		canary := a.(k8stesting.CreateAction).GetObject().(*corev1.ConfigMap)
		spared <- f.checker.Spares("ConfigMap", "ns", canary.Name)
		return false, nil, nil
	})
	close(ready)
	require.True(t, <-spared)
	f.await(t, 2)
	f.clock.Step(window)
	require.NoError(t, <-f.done)
}

func startWatch(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t, func(ctx context.Context, f *fixture) error {
		return f.checker.Watch(ctx, func(err error) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.failed = append(f.failed, err)
		})
	})
	f.await(t, 1) // the ticker of the periods
	return f
}

// TestWatchFindsCollectorThatStartsLater, which a check at the start alone misses.
func TestWatchFindsCollectorThatStartsLater(t *testing.T) {
	f := startWatch(t)
	f.clock.Step(period)
	f.await(t, 3)
	f.clock.Step(window)
	require.Eventually(t, func() bool { return len(f.canaries(t)) == 0 }, testkit.Timeout, testkit.Tick, "the first check finds none")
	f.clock.Step(period)
	f.await(t, 4)
	f.deleteCanary(t)
	f.clock.Step(read)
	require.ErrorIs(t, <-f.done, conflict.ErrFound)
}

func TestWatchContinuesAfterFailure(t *testing.T) {
	f := startWatch(t)
	unavailable, fail := errors.New("unavailable"), true
	f.client.PrependReactor("create", "configmaps", func(k8stesting.Action) (bool, runtime.Object, error) {
		if fail {
			fail = false
			return true, nil, unavailable
		}
		return false, nil, nil
	})
	f.clock.Step(period)
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.failed) == 1
	}, testkit.Timeout, testkit.Tick)
	require.ErrorIs(t, f.failed[0], unavailable)
	f.clock.Step(period)
	f.await(t, 3)
	f.cancel()
	require.NoError(t, <-f.done)
	require.Empty(t, f.canaries(t))
}
