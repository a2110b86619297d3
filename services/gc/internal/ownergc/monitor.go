package ownergc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// The backoff of a resource that cannot be listed or watched.
const (
	firstRetry = 200 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// monitor lists and watches one resource and updates the graph. It stores no objects: the graph is the store.
type monitor struct {
	resource

	collector *Collector
	synced    chan struct{} // closed after the first list
	once      sync.Once
	cancel    context.CancelFunc
	done      chan struct{}
	log       logr.Logger
	ctx       context.Context //nolint:containedctx // the store of a Reflector gets no context
}

func newMonitor(c *Collector, r resource) *monitor {
	return &monitor{resource: r, collector: c, synced: make(chan struct{}), done: make(chan struct{})}
}

func (m *monitor) start(ctx context.Context) {
	m.log = logr.FromContextOrDiscard(ctx).WithValues(obs.KeyResource, m.GroupResource().String())
	m.ctx, m.cancel = context.WithCancel(ctx)
	go func() {
		defer close(m.done)
		m.run(m.ctx)
	}()
}

// stop ends a monitor that was started, and waits until it has ended.
func (m *monitor) stop() {
	m.cancel()
	<-m.done
}

func (m *monitor) run(ctx context.Context) {
	reflector := cache.NewReflectorWithOptions(m.listWatch(), &metav1.PartialObjectMetadata{}, m, cache.ReflectorOptions{
		Name: "ownergc " + m.GroupResource().String(), Logger: &m.log, TypeDescription: m.String(), Clock: m.collector.Clock})
	backoff := wait.Backoff{Duration: firstRetry, Factor: 2, Jitter: 0.5, Steps: 20, Cap: lastRetry}
	next := backoff
	for {
		start := m.collector.Clock.Now()
		err := reflector.ListAndWatchWithContext(ctx)
		if ctx.Err() != nil {
			return
		}
		if m.collector.Clock.Since(start) > lastRetry {
			next = backoff
		}
		m.report(err)
		timer := m.collector.Clock.NewTimer(next.Step())
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

func (m *monitor) listWatch() *cache.ListWatch {
	api := m.collector.Metadata.Resource(m.GroupVersionResource)
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return api.List(ctx, o) },
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return api.Watch(ctx, o)
		},
	}
}

// report records why a list or watch ended, except for the regular ends of a watch.
func (m *monitor) report(err error) {
	if err == nil || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || errors.Is(err, io.EOF) {
		return
	}
	m.log.V(2).Info("listing or watching failed", obs.KeyError, err.Error())
	m.collector.metrics.syncErrors.WithLabelValues("resource").Inc()
	m.collector.setFailing(m, err.Error())
}

// setFailing records why a resource cannot be watched; an empty reason means that it can.
func (c *Collector) setFailing(m *monitor, why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.monitors[m.GroupVersionResource] != m: // it was stopped
	case why == "":
		delete(c.failing, m.GroupResource())
	default:
		c.failing[m.GroupResource()] = why
	}
}

// Add implements cache.ReflectorStore.
func (m *monitor) Add(obj any) error { return m.Update(obj) }

// Update implements cache.ReflectorStore.
func (m *monitor) Update(obj any) error {
	o, err := m.object(obj)
	if err != nil {
		return err
	}
	m.collector.update(m.ctx, func(g *graph.Graph) graph.Effects { return g.Observe(o) })
	return nil
}

// Delete implements cache.ReflectorStore: a watch reported a deletion.
func (m *monitor) Delete(obj any) error {
	o, err := m.object(obj)
	if err != nil {
		return err
	}
	m.collector.update(m.ctx, func(g *graph.Graph) graph.Effects { return g.Remove(o) })
	return nil
}

// Replace implements cache.ReflectorStore: a list. Objects that it lacks become doubtful.
func (m *monitor) Replace(list []any, _ string) error {
	objects := make([]graph.Object, 0, len(list))
	for _, obj := range list {
		o, err := m.object(obj)
		if err != nil {
			return err
		}
		objects = append(objects, o)
	}
	m.collector.update(m.ctx, func(g *graph.Graph) graph.Effects { return g.List(m.kind, objects) })
	m.collector.setFailing(m, "")
	m.once.Do(func() { close(m.synced) })
	return nil
}

// Resync implements cache.ReflectorStore.
func (m *monitor) Resync() error { return nil }

func (m *monitor) object(obj any) (graph.Object, error) {
	meta, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return graph.Object{}, fmt.Errorf("watching %s: unexpected type %T", m.GroupResource(), obj)
	}
	return observed(m.kind, meta), nil
}
