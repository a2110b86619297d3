// Package ownergc is the owner-reference garbage collector around its pure core (graph): it watches the metadata of every
// resource that can be deleted and watched, feeds the graph, and carries out what the graph decides. Every write is bound to
// the UID and the resource version for which it was decided; one that comes too late is decided anew by the object as it is.
//
//	discovery, each 30 s --> monitors (one for each resource: list, watch) --> graph --> attemptToDelete  --> workers --> API
//	                                                                             |   \-> attemptToOrphan  -/      |
//	                                                                             ^-----------------------------------+
//	                                                                                what the API server answers
//
// All methods may be called concurrently; Run is called once. The graph has one lock, under which nothing waits.
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

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// remembered is how many owners are remembered to be gone, beyond those that have dependents.
const remembered = 4096

// Discovery tells which resources there are. A discovery client of client-go's is one.
type Discovery interface {
	ServerGroupsAndResources() ([]*metav1.APIGroup, []*metav1.APIResourceList, error)
}

// Config is what a Collector needs.
type Config struct {
	Metadata  metadata.Interface
	Discovery Discovery
	// Recorder takes Warning Events about impossible owner references.
	Recorder events.EventRecorder
	// Workers is how many items are worked on at once, in each of the two queues.
	Workers int
	// SyncPeriod is the time between looks at discovery; InitialSyncTimeout how long the workers wait for the first lists.
	SyncPeriod, InitialSyncTimeout time.Duration
	// Ignored resources are not watched.
	Ignored []schema.GroupResource
	// InScope tells whether objects of a group may be written; nil: all.
	InScope func(group string) bool
	// Permit is asked before each write, Events included; an error is why there is to be none now. Before a deletion it is told how many more
	// there will be; otherwise it gets nil.
	Permit func(deletion *breaker.Intent) error
	// Deleted, if not nil, is told of each deletion. It must not block.
	Deleted func(Deletion)
	Clock   clock.WithTicker
	Metrics prometheus.Registerer
}

// Deletion is one that the collector has made.
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
	// since is when an item was queued first, until it is done.
	since map[graph.Item]time.Time
	// resources is what discovery said last, monitors what is watched of it.
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
	c := &Collector{Config: cfg, graph: graph.New(remembered), since: map[graph.Item]time.Time{},
		monitors: map[schema.GroupVersionResource]*monitor{}, failing: map[schema.GroupResource]string{}, synced: make(chan struct{})}
	c.toDelete, c.toOrphan = c.queue(), c.queue()
	m, err := newMetrics(cfg.Metrics, c)
	c.metrics = m
	return c, err
}

func (c *Collector) queue() workqueue.TypedRateLimitingInterface[graph.Item] {
	return workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[graph.Item](5*time.Millisecond, time.Minute),
		workqueue.TypedRateLimitingQueueConfig[graph.Item]{Clock: c.Clock})
}

// Run runs until ctx ends, and returns when all that it started has ended.
func (c *Collector) Run(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer c.toDelete.ShutDown()
	defer c.toOrphan.ShutDown()
	defer c.stopMonitors() // what is deferred last comes first
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

// awaitSync waits until every resource was listed once, or for the timeout: one that cannot be listed keeps nobody.
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
			log.Info("not all resources could be listed, proceeding anyway", "failing", c.Failing())
			return
		}
	}
	log.Info("all resources were listed", "resources", len(waiting), "objects", c.Size().Objects)
}

// Synced is closed when the workers start: all resources were listed, or the initial timeout is over.
func (c *Collector) Synced() <-chan struct{} { return c.synced }

// Resume queues all that there is to do: for a collector that was not permitted to write until now.
func (c *Collector) Resume(ctx context.Context) { c.update(ctx, (*graph.Graph).Pending) }

// update changes the graph and queues what follows.
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

// Size tells how large the graph is.
func (c *Collector) Size() graph.Size {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.graph.Size()
}

// Failing are the resources that cannot be listed or watched now, with the reason.
func (c *Collector) Failing() map[string]string {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]string{}
	for r, why := range c.failing {
		out[r.String()] = why
	}
	return out
}

// Query asks the graph something. The function must not keep it, nor wait.
func (c *Collector) Query(ask func(*graph.Graph)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ask(c.graph)
}
