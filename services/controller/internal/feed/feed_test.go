package feed_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/feed"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

func enqueue() handler.TypedFuncs[types.NamespacedName, reconcile.Request] {
	return handler.TypedFuncs[types.NamespacedName, reconcile.Request]{
		GenericFunc: func(_ context.Context, e event.TypedGenericEvent[types.NamespacedName], q queue) {
			q.Add(reconcile.Request{NamespacedName: e.Object})
		},
	}
}

// newQueue returns a queue that is shut down with the test.
func newQueue(t *testing.T) queue {
	q := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[reconcile.Request]())
	t.Cleanup(q.ShutDown)
	return q
}

func TestEventsReachTheQueue(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f := feed.New[types.NamespacedName]()
	q := newQueue(t)
	stopped := make(chan error)
	go func() { stopped <- f.Start(ctx) }()
	want := types.NamespacedName{Namespace: "ns", Name: "a"}
	sent := make(chan struct{})
	go func() { defer close(sent); f.Send(want) }() // before the source is started
	require.NoError(t, f.Source(enqueue()).Start(ctx, q))
	<-sent
	got, shutdown := q.Get()
	require.False(t, shutdown)
	require.Equal(t, want, got.NamespacedName)
	q.Done(got)

	for range 5000 { // more than any buffer: no event is dropped and the sender is not blocked by an idle worker
		f.Send(want)
	}
	f.Send(types.NamespacedName{Name: "last"})
	require.Eventually(t, func() bool { return q.Len() == 2 }, testkit.Timeout, testkit.Tick)
	cancel()
	require.NoError(t, <-stopped)
}

func TestSendReturnsAfterStop(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f := feed.New[types.NamespacedName]()
	blocked := make(chan struct{})
	go func() { defer close(blocked); f.Send(types.NamespacedName{Name: "a"}) }() // no source receives it
	cancel()
	require.NoError(t, f.Start(ctx))
	<-blocked
	f.Send(types.NamespacedName{Name: "b"})
	require.NoError(t, f.Start(ctx), "stops once")
}
