// Package informer makes informers that follow the API server again soon after it was away. client-go's own wait up to a minute
// then: the delay of a reflector doubles with each failure, and is reset only after two minutes without one. Meanwhile agents and
// sandboxes that are new to the API server do not exist for the component.
package informer

import (
	"context"
	"errors"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// retries is the policy while the API server is away. A component has a handful of informers.
var retries = backoff.Policy{Initial: 250 * time.Millisecond, Max: time.Second}

// New is cache.NewSharedIndexInformer with a source that repeats requests which did not reach the API server, or which it could not
// handle for the moment. It is the NewInformer of controller-runtime's cache.Options.
func New(source cache.ListerWatcher, example runtime.Object, resync time.Duration, indexers cache.Indexers) cache.SharedIndexInformer {
	return cache.NewSharedIndexInformer(Retrying(source), example, resync, indexers)
}

// Retrying returns the source of New.
func Retrying(source cache.ListerWatcher) cache.ListerWatcher {
	inner := cache.ToListerWatcherWithContext(source)
	return cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return retry(ctx, func() (runtime.Object, error) { return inner.ListWithContext(ctx, options) })
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return retry(ctx, func() (watch.Interface, error) { return inner.WatchWithContext(ctx, options) })
		},
	}, source)
}

func retry[T any](ctx context.Context, call func() (T, error)) (answer T, err error) {
	logged := false
	err = backoff.Retry(ctx, clock.RealClock{}, retries, func(context.Context) error {
		var err error
		if answer, err = call(); !transient(err) {
			return backoff.Permanent(err)
		}
		if !logged {
			klog.FromContext(ctx).Info("the API server cannot be watched, retrying", obs.KeyError, err.Error())
			logged = true
		}
		return err
	})
	return answer, err
}

// transient reports whether an error ends when the API server is back. Any other is the reflector's to handle.
func transient(err error) bool {
	status := apierrors.APIStatus(nil)
	if !errors.As(err, &status) {
		return err != nil // no answer
	}
	return apierrors.IsServiceUnavailable(err) || apierrors.IsServerTimeout(err) || apierrors.IsTooManyRequests(err) || apierrors.IsTimeout(err)
}
