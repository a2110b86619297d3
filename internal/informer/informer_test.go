package informer_test

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/fast-sandbox/fast-sandbox/internal/informer"
)

// server is an API server with Pods that can be away.
type server struct {
	mu       sync.Mutex
	away     error
	pods     []corev1.Pod
	watchers []*watch.FakeWatcher
}

func (s *server) list(context.Context, metav1.ListOptions) (runtime.Object, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	return &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "1"}, Items: s.pods}, nil
}

func (s *server) watch(context.Context, metav1.ListOptions) (watch.Interface, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away != nil {
		return nil, s.away
	}
	w := watch.NewFakeWithChanSize(10, false)
	s.watchers = append(s.watchers, w)
	return w, nil
}

// set ends the watches and makes the server answer with an error, or normally.
func (s *server) set(away error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.away = away
	for _, w := range s.watchers {
		w.Stop()
	}
	s.watchers = nil
}

// create makes a Pod, which the watches show.
func (s *server) create(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "2"}}
	s.pods = append(s.pods, p)
	for _, w := range s.watchers {
		w.Add(&p)
	}
}

// TestAfterOutages: however often the API server was away, what is new is seen within seconds of its return.
func TestAfterOutages(t *testing.T) {
	unavailable := apierrors.NewServiceUnavailable("starting")
	for name, away := range map[string]error{"not reached": syscall.ECONNREFUSED, "not ready": unavailable} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{}
				i := s.informer()
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { i.RunWithContext(ctx) })
				defer wg.Wait()
				defer cancel()
				require.True(t, cache.WaitForCacheSync(ctx.Done(), i.HasSynced))
				for _, name := range []string{"a", "b", "c", "d", "e", "f"} {
					s.set(away)
					<-time.After(15 * time.Second)
					s.set(nil)
					<-time.After(5 * time.Second) // the informer watches again
					s.create(name)
					synctest.Wait()
					_, known, err := i.GetStore().GetByKey(name)
					require.NoError(t, err)
					require.True(t, known, name)
				}
			})
		})
	}
}

func (s *server) informer() cache.SharedIndexInformer {
	return informer.New(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: s.list, WatchFuncWithContext: s.watch,
	}, unsupported{}), &corev1.Pod{}, 0, cache.Indexers{})
}

// unsupported is a client without watch lists.
type unsupported struct{}

func (unsupported) IsWatchListSemanticsUnSupported() bool { return true }

// TestOtherErrors: errors that do not end by themselves are the reflector's to handle, at once.
func TestOtherErrors(t *testing.T) {
	for name, err := range map[string]error{
		"expired":   apierrors.NewResourceExpired("too old"),
		"forbidden": apierrors.NewForbidden(corev1.Resource("pods"), "", errors.New("no right")),
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{away: err}
				i := s.informer()
				failed := make(chan error, 100)
				require.NoError(t, i.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { failed <- err }))
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { i.RunWithContext(ctx) })
				defer wg.Wait()
				defer cancel()
				require.ErrorIs(t, <-failed, err)
			})
		})
	}
}
