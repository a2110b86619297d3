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
package registry

import (
	"container/heap"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
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

// Key names a place's sandbox.
type Key struct {
	SandboxUID string
	Attempt    int64
}

// Pool names a pool.
type Pool struct {
	Namespace, Name string
}

// Sandbox is an agent's word on one place.
type Sandbox struct {
	Key Key
	// Ports that the sandbox has on its agent.
	Ports []int32
	// Gone tells that the place is free again.
	Gone bool
}

// Snapshot is an agent's whole state.
type Snapshot struct {
	UID           string
	Pool          Pool
	Capacity      int
	ReservedPorts []int32
	Sandboxes     []Sandbox
	Images        []string
	Accepting     bool
	Reason        string
}

// Delta is a change of an agent's state.
type Delta struct {
	UID           string
	Sandboxes     []Sandbox
	ImagesAdded   []string
	ImagesRemoved []string
	// Accepting is nil if it did not change.
	Accepting *bool
	Reason    string
}

// View is the state of one agent.
type View struct {
	UID                 string
	Pool                Pool
	Capacity, Allocated int
	Images              int
	Ready               bool
	// Reason tells why the agent is not ready; empty while it is.
	Reason string
	// Heard is when the agent was last heard of; zero if never.
	Heard time.Time
}

type agent struct {
	placement.Agent
	pool     Pool
	reserved []int32
	reason   string
	seen     bool // a snapshot was received
	places   map[Key]*place
}

type place struct {
	key      Key
	agent    *agent
	ports    []int32
	reported bool
	reserved bool
	until    time.Time
	index    int // in the heap while reserved
}

// Registry is the memory of places.
type Registry struct {
	heartbeat, reservation time.Duration

	mu     sync.Mutex
	agents map[string]*agent
	pools  map[Pool][]*placement.Agent // in the order of uids
	byKey  map[Key]*place              // where a sandbox's place was last given or reported
	expiry expiries                    // reservations by their end
}

// New returns an empty registry. Zero durations take the defaults.
func New(heartbeatTimeout, reservation time.Duration) *Registry {
	if heartbeatTimeout <= 0 {
		heartbeatTimeout = DefaultHeartbeatTimeout
	}
	if reservation <= 0 {
		reservation = DefaultReservation
	}
	return &Registry{
		heartbeat: heartbeatTimeout, reservation: reservation,
		agents: map[string]*agent{}, pools: map[Pool][]*placement.Agent{}, byKey: map[Key]*place{},
	}
}

// enter brings the state to `now`: reservations that are over end here, in the order of their ends. The lock is held.
func (r *Registry) enter(now time.Time) {
	for len(r.expiry) > 0 && !now.Before(r.expiry[0].until) {
		r.unreserve(r.expiry[0])
	}
}

// Join makes an agent known that was not heard of yet; it is not ready. An agent that is known stays as it is.
func (r *Registry) Join(uid string, pool Pool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.join(uid, pool)
}

func (r *Registry) join(uid string, pool Pool) *agent {
	if a, ok := r.agents[uid]; ok {
		if a.pool != pool {
			r.unlist(a)
			a.pool = pool
			r.list(a)
		}
		return a
	}
	a := &agent{pool: pool, reason: ReasonConnecting, places: map[Key]*place{}}
	a.UID = uid
	a.Images = map[string]struct{}{}
	a.Ports = map[int32]int{}
	r.agents[uid] = a
	r.list(a)
	return a
}

func (r *Registry) list(a *agent) {
	l := r.pools[a.pool]
	i, _ := slices.BinarySearchFunc(l, a.UID, byUID)
	r.pools[a.pool] = slices.Insert(l, i, &a.Agent)
}

func (r *Registry) unlist(a *agent) {
	l := r.pools[a.pool]
	if i, ok := slices.BinarySearchFunc(l, a.UID, byUID); ok {
		l = slices.Delete(l, i, i+1)
	}
	if len(l) == 0 {
		delete(r.pools, a.pool)
		return
	}
	r.pools[a.pool] = l
}

func byUID(a *placement.Agent, uid string) int { return strings.Compare(a.UID, uid) }

// Leave forgets an agent and every place on it. An unknown agent is forgotten already.
func (r *Registry) Leave(uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.agents[uid]
	if !ok {
		return
	}
	for _, p := range a.places {
		p.reported = false
		r.unreserve(p)
	}
	r.unlist(a)
	delete(r.agents, uid)
}

// free removes a place that nobody holds any more.
func (r *Registry) free(p *place) {
	if p.reported || p.reserved {
		return
	}
	a := p.agent
	if a.places[p.key] != p {
		return
	}
	delete(a.places, p.key)
	a.Allocated--
	a.release(p.ports)
	if r.byKey[p.key] == p {
		delete(r.byKey, p.key)
	}
}

// unreserve ends a reservation, if there is one, and frees the place if the agent does not report it.
func (r *Registry) unreserve(p *place) {
	if p.reserved {
		heap.Remove(&r.expiry, p.index)
		p.reserved = false
	}
	r.free(p)
}

func (a *agent) take(ports []int32) {
	for _, p := range ports {
		a.Ports[p]++
	}
}

func (a *agent) release(ports []int32) {
	for _, p := range ports {
		if a.Ports[p]--; a.Ports[p] <= 0 {
			delete(a.Ports, p)
		}
	}
}

// expiries is a heap of reservations by their end.
type expiries []*place

func (e expiries) Len() int           { return len(e) }
func (e expiries) Less(i, j int) bool { return e[i].until.Before(e[j].until) }
func (e expiries) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].index, e[j].index = i, j
}

// Push implements heap.Interface.
func (e *expiries) Push(x any) {
	p := x.(*place)
	p.index = len(*e)
	*e = append(*e, p)
}

// Pop implements heap.Interface.
func (e *expiries) Pop() any {
	old := *e
	p := old[len(old)-1]
	old[len(old)-1] = nil
	*e = old[:len(old)-1]
	return p
}
