package pool

import (
	"context"
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// expectationTime is how long a Pod that was created may be missing from the cache before it is taken to be gone: it was
// deleted before the cache ever saw it.
const expectationTime = time.Minute

// expectations remember what was done and is not in the cache yet, so that an old cache makes no Pod twice.
type expectations struct {
	clock clock.PassiveClock

	mu sync.Mutex
	by map[types.NamespacedName]*expected
}

type expected struct {
	created map[types.UID]time.Time
	deleted sets.Set[types.UID]
	// drains is what was written last of why a Pod drains, until the cache shows it.
	drains map[types.UID]written
}

type written struct {
	reason string
	at     time.Time
}

func newExpectations(c clock.PassiveClock) *expectations {
	return &expectations{clock: c, by: map[types.NamespacedName]*expected{}}
}

func (e *expectations) of(pool types.NamespacedName) *expected {
	x := e.by[pool]
	if x == nil {
		x = &expected{created: map[types.UID]time.Time{}, deleted: sets.New[types.UID](), drains: map[types.UID]written{}}
		e.by[pool] = x
	}
	return x
}

func (e *expectations) created(pool types.NamespacedName, pod types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(pool).created[pod] = e.clock.Now()
}

func (e *expectations) deleted(pool types.NamespacedName, pod types.UID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(pool).deleted.Insert(pod)
}

func (e *expectations) drained(pool types.NamespacedName, pod types.UID, reason string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.of(pool).drains[pod] = written{reason, e.clock.Now()}
}

// draining is why a Pod drains, of which the cache says what is given.
func (e *expectations) draining(pool types.NamespacedName, pod types.UID, cached string) string {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.of(pool)
	if w, ok := x.drains[pod]; ok && w.reason != cached && e.clock.Since(w.at) < expectationTime {
		return w.reason
	}
	delete(x.drains, pod)
	return cached
}

func (e *expectations) isDeleted(pool types.NamespacedName, pod types.UID) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.of(pool).deleted.Has(pod)
}

// observe takes in what the cache has and returns how many created Pods it does not have yet.
func (e *expectations) observe(pool types.NamespacedName, seen sets.Set[types.UID]) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.of(pool)
	for uid, at := range x.created {
		if seen.Has(uid) || e.clock.Since(at) > expectationTime {
			delete(x.created, uid)
		}
	}
	x.deleted = x.deleted.Intersection(seen)
	maps.DeleteFunc(x.drains, func(uid types.UID, _ written) bool { return !seen.Has(uid) })
	return len(x.created)
}

func (e *expectations) forget(pool types.NamespacedName) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.by, pool)
}

// idleness remembers since when agents could have gone without a break.
type idleness struct {
	clock clock.PassiveClock

	mu    sync.Mutex
	since map[types.NamespacedName]map[string]time.Time
}

func newIdleness(c clock.PassiveClock) *idleness {
	return &idleness{clock: c, since: map[types.NamespacedName]map[string]time.Time{}}
}

// settle takes in which agents of a pool could go now and returns for how long each of them could.
func (i *idleness) settle(pool types.NamespacedName, names []string) map[string]time.Duration {
	i.mu.Lock()
	defer i.mu.Unlock()
	old, fresh, out := i.since[pool], map[string]time.Time{}, map[string]time.Duration{}
	now := i.clock.Now()
	for _, n := range names {
		at, ok := old[n]
		if !ok {
			at = now
		}
		fresh[n], out[n] = at, now.Sub(at)
	}
	i.since[pool] = fresh
	return out
}

func (i *idleness) forget(pool types.NamespacedName) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.since, pool)
}

// countsInterval is how often at most the mere counts of a pool are written: they change with each sandbox, of which there
// may be hundreds a second, and a write costs the API server more than the sandbox itself.
const countsInterval = time.Second

// pace remembers when the status of pools was written.
type pace struct {
	clock clock.PassiveClock

	mu sync.Mutex
	at map[types.NamespacedName]time.Time
}

func newPace(c clock.PassiveClock) *pace {
	return &pace{clock: c, at: map[types.NamespacedName]time.Time{}}
}

// left is how long mere counts have to wait.
func (p *pace) left(pool types.NamespacedName) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at[pool].Add(countsInterval).Sub(p.clock.Now())
}

func (p *pace) wrote(pool types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at[pool] = p.clock.Now()
}

func (p *pace) forget(pool types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.at, pool)
}

// feed is a source of pools that the Registry has news of. What comes before the controller has started is dropped: it
// begins with all pools.
type feed struct {
	mu    sync.Mutex
	queue workqueue.TypedRateLimitingInterface[reconcile.Request]
}

func (f *feed) start(_ context.Context, q workqueue.TypedRateLimitingInterface[reconcile.Request]) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue = q
	return nil
}

// feedDelay gathers the many changes of a busy pool into one look.
const feedDelay = 50 * time.Millisecond

func (f *feed) add(n types.NamespacedName) {
	f.mu.Lock()
	q := f.queue
	f.mu.Unlock()
	if q != nil {
		q.AddAfter(reconcile.Request{NamespacedName: n}, feedDelay)
	}
}
