// Package registry owns the capacity of agents: which agents there are, how many sandboxes each can take, and which
// sandboxes have taken that capacity. It is rebuilt from agents' reports and never written to disk. It does no I/O and starts
// no timer: every method that depends on time takes it as `now`. All methods may be called concurrently; one lock guards all
// state. Pure.
//
// An allocation is one unit of an agent's capacity, taken by one attempt of a sandbox. It is reserved (Allocate), reported
// by the agent, or both, and counts once:
//
//	          Allocate                 report                    report "ended" | snapshot without it
//	(free) ------------> [reserved] ----------> [reserved+reported] ---------------------> (free)
//	   |                     | Release | 30 s         | Release | 30 s
//	   | report              v                        v
//	   +----------------> (free)                 [reported] --> (free), as above
//
// Quotas of namespaces are checked, and charged, under the same lock as the placement (quota.go), so that concurrent creates cannot
// exceed one together.
//
// Package placement defines which agent is best, package index finds it. This package keeps the index up to date: it calls
// refresh after every change of an agent.
package registry

import (
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry/index"
)

// Defaults of the source documents and of AllocatorService.
const (
	// DefaultHeartbeatTimeout is the silence after which an agent is not ready (seed 002).
	DefaultHeartbeatTimeout = 10 * time.Second
	// DefaultReservation is how long capacity is reserved for a sandbox that its agent does not report.
	DefaultReservation = 30 * time.Second
)

// Reasons why an agent is not ready.
const (
	ReasonConnecting   = "Connecting"
	ReasonHeartbeat    = "HeartbeatTimeout"
	reasonNotAccepting = "NotAccepting"
)

// Pool names a pool.
type Pool struct {
	Namespace, Name string
}

// Registry is the memory of capacity.
type Registry struct {
	heartbeat, reservation time.Duration

	mu     sync.Mutex
	agents map[string]*agent
	pools  map[Pool]*pool
	spaces map[string]*space // by namespace
	// creating holds the namespaces of the sandboxes that count because they are being created, by uid.
	creating map[string]*space
	// attempts leads to the first allocation of each attempt, allocation.next from there to its others.
	attempts *attempts
	// expiry orders the reserved allocations by the end of their reservations. heartbeats orders the agents that are not silent
	// by their last heartbeats. Both ends lie a fixed time ahead, so a new entry belongs at the back.
	expiry     node[allocation]
	heartbeats node[agent]
	spare      []*allocation
	epoch      uint64 // counts snapshots
}

// New returns an empty registry. A zero duration selects the default.
func New(heartbeatTimeout, reservation time.Duration) *Registry {
	if heartbeatTimeout <= 0 {
		heartbeatTimeout = DefaultHeartbeatTimeout
	}
	if reservation <= 0 {
		reservation = DefaultReservation
	}
	r := &Registry{
		heartbeat: heartbeatTimeout, reservation: reservation,
		agents: map[string]*agent{}, pools: map[Pool]*pool{}, attempts: newAttempts(),
		spaces: map[string]*space{}, creating: map[string]*space{},
	}
	r.expiry.init(nil)
	r.heartbeats.init(nil)
	return r
}

// enter advances the state to now: it ends the reservations that have expired, in order, and withdraws the agents that have
// been silent for too long. mu is held.
func (r *Registry) enter(now time.Time) {
	for !r.expiry.alone() {
		l := r.expiry.next.owner
		if now.Before(l.until) {
			break
		}
		r.release(l)
	}
	for !r.heartbeats.alone() {
		a := r.heartbeats.next.owner
		if now.Sub(a.lastHeartbeat) <= r.heartbeat {
			break
		}
		a.beating.leave()
		a.refresh()
	}
}

// beat records a message of an agent. Callers read their clocks before they take the lock, so times may arrive slightly out
// of order.
func (r *Registry) beat(now time.Time, a *agent) {
	if !a.beating.alone() && now.Before(a.lastHeartbeat) {
		return
	}
	a.lastHeartbeat = now
	a.beating.leave()
	at := r.heartbeats.prev
	for at != &r.heartbeats && at.owner.lastHeartbeat.After(now) {
		at = at.prev
	}
	a.beating.follow(at)
}

// Join adds an agent that has sent no snapshot yet. It is not ready. A known agent keeps its state.
func (r *Registry) Join(uid string, pool Pool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.join(uid, pool)
}

func (r *Registry) join(uid string, name Pool) *agent {
	a, ok := r.agents[uid]
	if !ok {
		a = &agent{uid: uid, reason: ReasonConnecting}
		a.beating.init(a)
		a.allocations = a.few[:0]
		r.agents[uid] = a
		r.addTo(name, a)
	} else if a.pool.name != name {
		r.move(a, name)
	}
	return a
}

// addTo adds an agent without images and ports to a pool.
func (r *Registry) addTo(name Pool, a *agent) {
	p := r.pools[name]
	if p == nil {
		p = &pool{name: name, index: index.New(), space: r.space(name.Namespace)}
		p.space.pools++
		r.pools[name] = p
	}
	a.pool = p
	a.id = p.index.Join()
	for int(a.id) >= len(p.agents) {
		p.agents = append(p.agents, nil)
	}
	p.agents[a.id] = a
}

// removeFromPool removes an agent, whose ports are freed, from its pool.
func (r *Registry) removeFromPool(a *agent) {
	p := a.pool
	a.setFull(false)
	p.index.Leave(a.id)
	p.agents[a.id] = nil
	if p.index.Len() == 0 {
		delete(r.pools, p.name)
		p.space.pools--
		r.drop(p.space)
	}
}

// move moves an agent with its allocations, ports and images to another pool.
func (r *Registry) move(a *agent, name Pool) {
	images := a.pool.index.ImagesOf(a.id)
	a.eachPorts(a.freePorts)
	for _, l := range a.allocations {
		a.pool.space.discharge(l.demand)
	}
	r.removeFromPool(a)
	r.addTo(name, a)
	a.eachPorts(a.takePorts)
	for _, l := range a.allocations {
		a.pool.space.charge(l.demand)
	}
	for _, image := range images {
		a.pool.index.AddImage(a.id, image)
	}
	a.refresh()
}

// Leave removes an agent and its allocations. It is idempotent.
func (r *Registry) Leave(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.agents[uid]
	if !ok {
		return
	}
	for len(a.allocations) > 0 {
		r.end(a.allocations[len(a.allocations)-1])
	}
	a.freePorts(a.ports)
	r.removeFromPool(a)
	a.beating.leave()
	delete(r.agents, uid)
}
