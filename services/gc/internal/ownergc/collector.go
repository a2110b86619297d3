// Package ownergc is the owner-reference garbage collector around its pure core (graph). It watches the metadata of every
// resource that can be deleted and watched, feeds the graph, and performs the actions that the graph decides. Every write is
// bound to the UID and the resource version for which it was decided; after a conflict it is decided again for the live object.
//
//	discovery, every 30 s --> monitors (list and watch, one per resource) --> graph --> attemptToDelete --> workers --> API
//	                                                                            |  \-> attemptToOrphan --/     |
//	                                                                            ^------------------------------+
//	                                                                               answers of the API server
//
// All methods may be called concurrently; Run is called once. One lock guards the graph; nothing blocks under it.
package ownergc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// remembered is the number of deleted owners that are remembered beyond those that have dependents.
const remembered = 4096

// Discovery lists the resources of the API server. client-go's discovery client implements it.
type Discovery interface {
	ServerGroupsAndResources() ([]*metav1.APIGroup, []*metav1.APIResourceList, error)
}

// Config is what a Collector needs.
type Config struct {
	Metadata  metadata.Interface
	Discovery Discovery
	// Recorder receives Warning Events about impossible owner references.
	Recorder events.EventRecorder
	// Workers is the number of concurrent workers for each of the two queues.
	Workers int
	// SyncPeriod is the interval between discoveries; InitialSyncTimeout bounds the wait for the first lists.
	SyncPeriod, InitialSyncTimeout time.Duration
	// Ignored resources are not watched.
	Ignored []schema.GroupResource
	// InScope reports whether objects of a group may be written; nil means all.
	InScope func(group string) bool
	// Spares reports whether an object must not be written although it is in scope; nil means none.
	Spares func(graph.Object) bool
	// Permit is called before each write, Events included; an error refuses it. deletion is nil for writes that delete nothing.
	Permit func(deletion *breaker.Intent) error
	// Deleted, if not nil, is called for each deletion. It must not block.
	Deleted func(Deletion)
	Clock   clock.WithTicker
	Metrics prometheus.Registerer
}

// Deletion is a deletion that the collector has made.
type Deletion struct {
	Object graph.Object
	Policy graph.Policy
	Cause  graph.Cause
	Time   time.Time
}

// Collector is the controller.
type Collector struct {
	Config

	metrics  *metrics
	toDelete workqueue.TypedRateLimitingInterface[graph.Item]
	toOrphan workqueue.TypedRateLimitingInterface[graph.Item]

	mu    sync.Mutex
	graph *graph.Graph
	// since is when an item was first queued, until it is done.
	since map[graph.Item]time.Time
	// resources is the result of the last discovery, monitors are the watches for it.
	resources resources
	monitors  map[schema.GroupVersionResource]*monitor
	failing   map[schema.GroupResource]string

	synced chan struct{}
}

// New returns a collector that is not running.
func New(cfg Config) (*Collector, error) {
	var problems []error
	for name, missing := range map[string]bool{
		"Metadata": cfg.Metadata == nil, "Discovery": cfg.Discovery == nil, "Recorder": cfg.Recorder == nil, "Workers": cfg.Workers <= 0,
		"SyncPeriod": cfg.SyncPeriod <= 0, "Permit": cfg.Permit == nil, "Clock": cfg.Clock == nil, "Metrics": cfg.Metrics == nil,
	} {
		if missing {
			problems = append(problems, fmt.Errorf("ownergc: %s is required", name))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	if cfg.InScope == nil {
		cfg.InScope = func(string) bool { return true }
	}
	if cfg.Spares == nil {
		cfg.Spares = func(graph.Object) bool { return false }
	}
	c := &Collector{Config: cfg, graph: graph.New(remembered), since: map[graph.Item]time.Time{},
		monitors: map[schema.GroupVersionResource]*monitor{}, failing: map[schema.GroupResource]string{}, synced: make(chan struct{})}
	queues, err := newQueueMetrics(cfg.Metrics)
	if err != nil {
		return nil, fmt.Errorf("registering metrics of queues: %w", err)
	}
	c.toDelete, c.toOrphan = c.newQueue(queueDelete, queues), c.newQueue(queueOrphan, queues)
	c.metrics, err = newMetrics(cfg.Metrics, c)
	if err != nil {
		c.shutDown()
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return c, nil
}

// shutDown ends the queues.
func (c *Collector) shutDown() {
	c.toDelete.ShutDown()
	c.toOrphan.ShutDown()
}

// Run runs until ctx ends, and returns when all goroutines that it started have ended.
func (c *Collector) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.shutDown()
	defer c.stopMonitors() // deferred last: runs first
	if err := c.sync(ctx); err != nil {
		log.Error(err, "discovering resources")
	}
	c.awaitSync(ctx)
	close(c.synced)
	for range c.Workers {
		wg.Go(func() { c.work(ctx, c.toDelete) })
		wg.Go(func() { c.work(ctx, c.toOrphan) })
	}
	ticker := c.Clock.NewTicker(c.SyncPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			if err := c.sync(ctx); err != nil {
				log.Error(err, "discovering resources")
			}
		}
	}
}

// awaitSync waits until every resource was listed once, or for the timeout: a resource that cannot be listed blocks nothing.
func (c *Collector) awaitSync(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	timeout := c.Clock.NewTimer(c.InitialSyncTimeout)
	defer timeout.Stop()
	c.mu.Lock()
	waiting := make([]*monitor, 0, len(c.monitors))
	for _, m := range c.monitors {
		waiting = append(waiting, m)
	}
	c.mu.Unlock()
	for _, m := range waiting {
		select {
		case <-m.synced:
		case <-ctx.Done():
			return
		case <-timeout.C():
			log.Info("not all resources could be listed, proceeding", obs.KeyFailing, c.Failing())
			return
		}
	}
	log.Info("listed all resources", obs.KeyResources, len(waiting), obs.KeyObjects, c.Size().Objects)
}

// Synced returns a channel that is closed when the workers start: all resources were listed, or the initial timeout is over.
func (c *Collector) Synced() <-chan struct{} { return c.synced }

// Resume queues all pending work, for a collector that was not permitted to write until now.
func (c *Collector) Resume(ctx context.Context) { c.update(ctx, (*graph.Graph).Pending) }

// update changes the graph and queues the resulting items.
func (c *Collector) update(ctx context.Context, change func(*graph.Graph) graph.Effects) {
	c.mu.Lock()
	fx := change(c.graph)
	now := c.Clock.Now()
	for _, i := range fx.Items {
		if _, ok := c.since[i]; !ok {
			c.since[i] = now
		}
	}
	c.mu.Unlock()
	for _, i := range fx.Items {
		if i.Orphan {
			c.toOrphan.Add(i)
		} else {
			c.toDelete.Add(i)
		}
	}
	for _, i := range fx.Invalid {
		c.warn(ctx, i)
	}
}

// Size returns the size of the graph.
func (c *Collector) Size() graph.Size {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.graph.Size()
}

// Failing returns the resources that cannot be listed or watched now, with the error.
func (c *Collector) Failing() map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]string{}
	for r, why := range c.failing {
		out[r.String()] = why
	}
	return out
}

// Query calls ask with the graph. ask must neither keep it nor block.
func (c *Collector) Query(ask func(*graph.Graph)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ask(c.graph)
}
