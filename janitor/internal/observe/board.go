package observe

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// memory is for how long a Pod is remembered that the API server had, and that nothing on the node names any more.
const memory = time.Hour

// name is the namespace and name of a Sandbox.
type name struct{ namespace, name string }

// resource is a Sandbox as far as verdicts need it, with its metadata.uid.
type resource struct {
	verdict.Resource
	uid string
}

// entry is what is known of one container.
type entry struct {
	container Container
	seen      time.Time // when containerd was asked for it
	// missing is since when its Sandbox is absent without a break; zero while it is not.
	missing time.Time
	// live is what the API server itself said of its Sandbox, in place of a cache that shows none, until a moment.
	live      resource
	liveUntil time.Time
	// asking tells that the API server is going to be asked for its Sandbox, and askAfter when, at the earliest; see wonder.
	asking   bool
	askAfter time.Time
	last     Finding
}

// Board is the picture of a node. Make it with New; Run keeps it.
type Board struct {
	config Config
	clock  clock.WithTicker
	looks  workqueue.TypedDelayingInterface[look]
	asks   workqueue.TypedDelayingInterface[string] // containers for whose Sandboxes the API server is to be asked

	mu         sync.Mutex
	containers map[string]*entry
	byAgent    map[string]map[string]*entry
	byName     map[name]map[string]*entry
	remnants   map[Key]*remnant
	// pods are those of the node that have not ended, as the cache shows them; known is when each that the API server ever had
	// was last of use. strangers are, of agents that it does not know, since when the node runs none of theirs either.
	pods      map[string]bool
	known     map[string]time.Time
	running   map[string]bool
	strangers map[string]time.Time
	resources map[name]resource
	// synced: all Pods and Sandboxes that the API server holds were seen; scanned: all containers were.
	synced, scanned bool
	changed         chan struct{} // closed at the next change
}

// look is a container that is to be looked at again: by a question to containerd, or with what is known.
type look struct {
	key     Key
	refresh bool
}

// New returns a Board of which nothing is known.
func New(cfg Config) *Board {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &Board{
		config: cfg, clock: cfg.Clock,
		looks:      workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[look]{Clock: cfg.Clock}),
		asks:       workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Clock: cfg.Clock}),
		containers: map[string]*entry{}, byAgent: map[string]map[string]*entry{}, byName: map[name]map[string]*entry{},
		remnants: map[Key]*remnant{}, pods: map[string]bool{}, known: map[string]time.Time{}, running: map[string]bool{},
		strangers: map[string]time.Time{}, resources: map[name]resource{}, changed: make(chan struct{}),
	}
}

// Findings are all things on the node with their verdicts, in no order. The error is errdefs.ErrUnavailable before there is
// anything to judge by.
func (b *Board) Findings() ([]Finding, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.unready(); err != nil {
		return nil, err
	}
	now := b.clock.Now()
	out := make([]Finding, 0, len(b.containers)+len(b.remnants))
	for _, e := range b.containers {
		b.judge(e, now)
		out = append(out, e.last)
	}
	for _, r := range b.remnants {
		b.judgeRemnant(r, now)
		out = append(out, r.last)
	}
	return out, nil
}

// Changed returns a channel that is closed as soon as Findings may answer otherwise, by more than the time that passes.
func (b *Board) Changed() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.changed
}

// Ready tells whether everything was seen once: by the caches and on the node.
func (b *Board) Ready() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.unready() == nil
}

// unready says what was not seen yet. mu is held.
func (b *Board) unready() error {
	switch {
	case !b.scanned:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the containers of this node have not been seen yet")
	case !b.synced:
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the API server's Pods and Sandboxes have not been seen yet")
	}
	return nil
}

// notify tells who waits that something changed. mu is held.
func (b *Board) notify() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// put takes in what containerd says of a container, and judges it. mu is held.
func (b *Board) put(c Container, seen time.Time) *entry {
	e := b.containers[c.ID]
	if e == nil {
		e = &entry{}
		b.containers[c.ID] = e
	} else {
		b.unlink(e)
	}
	if e.container.Identity != c.Identity {
		e.missing, e.live, e.liveUntil = time.Time{}, resource{}, time.Time{} // they were another's
	}
	if c.Defect != "" && c.Defect != e.container.Defect {
		b.config.Log.Info("labels of a container do not add up", "container", c.ID, "agentUID", c.Identity.AgentUID, "why", c.Defect)
	}
	c.Record = nil
	e.container, e.seen = c, seen
	add(b.byAgent, c.Identity.AgentUID, e)
	add(b.byName, nameOf(c.Identity), e)
	return e
}

// drop forgets a container that is no more. mu is held.
func (b *Board) drop(id string) {
	if e := b.containers[id]; e != nil {
		delete(b.containers, id)
		b.unlink(e)
		b.notify()
	}
}

func (b *Board) unlink(e *entry) {
	remove(b.byAgent, e.container.Identity.AgentUID, e)
	remove(b.byName, nameOf(e.container.Identity), e)
}

func add[K comparable](index map[K]map[string]*entry, k K, e *entry) {
	if index[k] == nil {
		index[k] = map[string]*entry{}
	}
	index[k][e.container.ID] = e
}

func remove[K comparable](index map[K]map[string]*entry, k K, e *entry) {
	delete(index[k], e.container.ID)
	if len(index[k]) == 0 {
		delete(index, k)
	}
}

func nameOf(i identity.Identity) name { return name{i.Namespace, i.Name} }

// named tells whether something on the node names an agent. mu is held.
func (b *Board) named(agentUID string) bool {
	if len(b.byAgent[agentUID]) > 0 {
		return true
	}
	return slices.ContainsFunc(slices.Collect(maps.Values(b.remnants)), func(r *remnant) bool { return r.ownedBy(agentUID) })
}

// forget drops what is remembered of Pods that nothing names any more. mu is held.
func (b *Board) forget(now time.Time) {
	for uid, last := range b.known {
		switch {
		case b.pods[uid] || b.named(uid):
			b.known[uid] = now
		case now.Sub(last) > memory:
			delete(b.known, uid)
		}
	}
	for uid := range b.strangers {
		if !b.named(uid) {
			delete(b.strangers, uid)
		}
	}
}
