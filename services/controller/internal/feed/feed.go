// Package feed carries events that do not come from the API server, such as changes in the agents' reports, to a controller
// as a controller-runtime channel source. It decides nothing and keeps nothing. All methods may be called concurrently.
package feed

import (
	"context"
	"sync"

	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// Feed is a stream of events of type T. It is a Runnable of the manager.
type Feed[T any] struct {
	events chan event.TypedGenericEvent[T]
	done   chan struct{}
	stop   func()
}

// New returns a feed. Until its source is started, Send blocks.
func New[T any]() *Feed[T] {
	f := &Feed[T]{events: make(chan event.TypedGenericEvent[T]), done: make(chan struct{})}
	f.stop = sync.OnceFunc(func() { close(f.done) })
	return f
}

// Send passes an event to the source. It waits for the source to receive it, which does not depend on the controller's
// workers, and returns at once after the feed has stopped.
func (f *Feed[T]) Send(v T) {
	select {
	case f.events <- event.TypedGenericEvent[T]{Object: v}:
	case <-f.done:
	}
}

// Source returns the source of the controller that handles the events.
func (f *Feed[T]) Source(h handler.TypedEventHandler[T, reconcile.Request]) source.Source {
	return source.Channel(f.events, h)
}

// Start stops the feed when ctx ends. It implements manager.Runnable.
func (f *Feed[T]) Start(ctx context.Context) error {
	<-ctx.Done()
	f.stop()
	return nil
}
