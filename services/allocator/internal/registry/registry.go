// Package registry is the memory of places: which agents there are, what room each has, and who has taken it. It rebuilds
// from agents' reports and is never written to disk. It does no I/O and starts no timer: every call that depends on time
// takes it as `now`. Every method may be called concurrently; all state stands behind one lock. Pure.
//
// A place belongs to one sandbox uid and attempt on one agent. It is taken by a reservation (Allocate), by the agent's
// report, or by both, and counts once:
//
//	          Allocate                 report                    report "gone" | snapshot without it
//	(free) ------------> [reserved] ----------> [reserved+reported] ---------------------> (free)
//	   |                     | Release | 30 s         | Release | 30 s
//	   | report              v                        v
//	   +----------------> (free)                 [reported] --> (free), as above
//
// Which agent is the best is placement's rule; finding it is the index's work. What is here keeps the index true: refresh
// is called after every change of an agent.
package registry

import (
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry/index"
)

// Defaults of the seeds and of AllocatorService.
const (
	// DefaultHeartbeatTimeout is the silence after which an agent takes no new sandboxes (seed 002).
	DefaultHeartbeatTimeout = 10 * time.Second
	// DefaultReservation is how long a place is kept for a sandbox that its agent does not report.
	DefaultReservation = 30 * time.Second
)

// Reasons why an agent is not ready.
const (
	ReasonConnecting = "Connecting"
	ReasonHeartbeat  = "HeartbeatTimeout"
	reasonRefusing   = "NotAccepting"
)

// attempt is the fence of any container of an attempt, whichever agent has it: the key of byKey.
func attempt(f identity.Fence) identity.Fence {
	f.AgentUID = ""
	return f
}

// Pool names a pool.
type Pool struct {
	Namespace, Name string
}

// Registry is the memory of places.
type Registry struct {
	heartbeat, reservation time.Duration

	mu     sync.Mutex
	agents map[string]*agent
	pools  map[Pool]*pool
	// byKey is where a sandbox's place was last given or reported; place.twin leads to the others of its key.
	byKey *keys
	// expiry holds the places that are reserved, the next to end first; heard the agents that are not silent, the next to
	// become so first. Both ends lie a fixed time ahead, so that what is new belongs at the back.
	expiry node[place]
	heard  node[agent]
	spare  []*place
	epoch  uint64 // counts snapshots
}

// New returns an empty registry. Zero durations take the defaults.
func New(heartbeatTimeout, reservation time.Duration) *Registry {
	if heartbeatTimeout <= 0 {
		heartbeatTimeout = DefaultHeartbeatTimeout
	}
	if reservation <= 0 {
		reservation = DefaultReservation
	}
	r := &Registry{
		heartbeat: heartbeatTimeout, reservation: reservation,
		agents: map[string]*agent{}, pools: map[Pool]*pool{}, byKey: newKeys(),
	}
	r.expiry.init(nil)
	r.heard.init(nil)
	return r
}

// enter brings the state to `now`: reservations that are over end here, in the order of their ends, and agents that have
// been silent for too long can be chosen no more. The lock is held.
func (r *Registry) enter(now time.Time) {
	for !r.expiry.alone() {
		p := r.expiry.next.owner
		if now.Before(p.until) {
			break
		}
		r.release(p)
	}
	for !r.heard.alone() {
		a := r.heard.next.owner
		if now.Sub(a.heard) <= r.heartbeat {
			break
		}
		a.hearing.leave()
		a.refresh()
	}
}

// hear notes that an agent was heard of. Callers read their clocks before they have the lock, so that words may come a
// little out of order.
func (r *Registry) hear(now time.Time, a *agent) {
	if !a.hearing.alone() && now.Before(a.heard) {
		return
	}
	a.heard = now
	a.hearing.leave()
	at := r.heard.prev
	for at != &r.heard && at.owner.heard.After(now) {
		at = at.prev
	}
	a.hearing.follow(at)
}

// Join makes an agent known that was not heard of yet; it is not ready. An agent that is known stays as it is.
func (r *Registry) Join(uid string, pool Pool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.join(uid, pool)
}

func (r *Registry) join(uid string, name Pool) *agent {
	a, ok := r.agents[uid]
	if !ok {
		a = &agent{uid: uid, reason: ReasonConnecting}
		a.hearing.init(a)
		a.places = a.few[:0]
		r.agents[uid] = a
		r.enrol(a, name)
	} else if a.pool.name != name {
		r.move(a, name)
	}
	return a
}

// enrol puts an agent without images and ports into a pool.
func (r *Registry) enrol(a *agent, name Pool) {
	p := r.pools[name]
	if p == nil {
		p = &pool{name: name, index: index.New()}
		r.pools[name] = p
	}
	a.pool = p
	a.id = p.index.Join()
	for int(a.id) >= len(p.agents) {
		p.agents = append(p.agents, nil)
	}
	p.agents[a.id] = a
}

// expel takes an agent, whose ports are freed, out of its pool.
func (r *Registry) expel(a *agent) {
	p := a.pool
	a.setFull(false)
	p.index.Leave(a.id)
	p.agents[a.id] = nil
	if p.index.Len() == 0 {
		delete(r.pools, p.name)
	}
}

// move takes an agent to another pool with all that it has.
func (r *Registry) move(a *agent, name Pool) {
	images := a.pool.index.ImagesOf(a.id)
	a.eachPorts(a.freePorts)
	r.expel(a)
	r.enrol(a, name)
	a.eachPorts(a.takePorts)
	for _, image := range images {
		a.pool.index.AddImage(a.id, image)
	}
	a.refresh()
}

// Leave forgets an agent and every place on it. An unknown agent is forgotten already.
func (r *Registry) Leave(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.agents[uid]
	if !ok {
		return
	}
	for len(a.places) > 0 {
		r.gone(a.places[len(a.places)-1])
	}
	a.freePorts(a.ports)
	r.expel(a)
	a.hearing.leave()
	delete(r.agents, uid)
}
