package pool

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"
)

// expectationTime is how long a Pod that was created may be missing in the cache, before it is assumed to be deleted already.
const expectationTime = time.Minute

// expectations remembers changes that the cache does not show yet, so that an outdated cache does not cause a second Pod.
type expectations struct {
	clock clock.PassiveClock

	mu sync.Mutex
	by map[types.NamespacedName]*expected
}

type expected struct {
	created map[types.UID]time.Time
	deleted sets.Set[types.UID]
	// drains are the reasons that were last written to Pods, until the cache shows them.
	drains map[types.UID]drainReason
}

type drainReason struct {
	reason string
	at     time.Time
}

func newExpectations(c clock.PassiveClock) *expectations {
	return &expectations{clock: c, by: map[types.NamespacedName]*expected{}}
}

func (e *expectations) of(pool types.NamespacedName) *expected {
	x := e.by[pool]
	if x == nil {
		x = &expected{created: map[types.UID]time.Time{}, deleted: sets.New[types.UID](), drains: map[types.UID]drainReason{}}
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
	e.of(pool).drains[pod] = drainReason{reason, e.clock.Now()}
}

// draining returns why a Pod is drained, given the reason in the cache.
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

// observe updates the expectations with the Pods in the cache, and returns the number of created Pods that it does not have yet.
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
	maps.DeleteFunc(x.drains, func(uid types.UID, _ drainReason) bool { return !seen.Has(uid) })
	return len(x.created)
}

func (e *expectations) forget(pool types.NamespacedName) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.by, pool)
}

// idleness remembers since when agents have been surplus without interruption.
type idleness struct {
	clock clock.PassiveClock

	mu    sync.Mutex
	since map[types.NamespacedName]map[string]time.Time
}

func newIdleness(c clock.PassiveClock) *idleness {
	return &idleness{clock: c, since: map[types.NamespacedName]map[string]time.Time{}}
}

// update records the surplus agents of a pool, and returns for how long each has been surplus.
func (i *idleness) update(pool types.NamespacedName, names []string) map[string]time.Duration {
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

// countsInterval is the shortest time between two writes of a status in which only counts have changed. They change with each
// sandbox, of which there may be hundreds a second.
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

// left returns the time for which a write of counts has to wait.
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
