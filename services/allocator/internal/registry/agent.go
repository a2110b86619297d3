package registry

import (
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry/index"
)

// View is the state of one agent.
type View struct {
	UID                 string
	Pool                Pool
	Capacity, Allocated int
	// FreeSlots is the number of slots that the agent has told of and nobody has claimed or is about to.
	FreeSlots int
	Images    int
	Ready     bool
	// Reason tells why the agent is not ready; empty while it is.
	Reason string
	// Heard is when the agent was last heard of; zero if never.
	LastHeartbeat time.Time
}

// pool is the agents of one pool.
type pool struct {
	name   Pool
	index  *index.Index
	agents []*agent // by number in the index, nil for one that has left
	full   int      // ready agents without room
}

// agent keeps together what an allocation touches: among very many agents each page that is not in the processor's tables
// costs as much as all of the arithmetic.
type agent struct {
	uid       string
	pool      *pool
	id        index.ID
	seen      bool // a snapshot was received
	accepting bool
	full      bool        // counted by the pool
	hearing   node[agent] // alone if the agent was never heard of or not for long

	capacity, allocated int
	// A slot is spoken for from the reservation until the agent's own count shows it: first as one of the pending places
	// (reserved, not reported), which no count can contain yet, then as a claimed one (reported since the last count). A
	// reservation that fails is pending no more and leaves the slot free.
	slots            int // by the agent's last word
	pending, claimed int

	places []*place   // in no order
	few    [16]*place // room for the first of places

	heard  time.Time
	ports  []int32 // of the agent itself
	reason string
}

func (a *agent) freeSlots() int { return max(0, a.slots-a.pending-a.claimed) }

// count takes the agent's word on its free slots.
func (a *agent) count(slots int) { a.slots, a.claimed = slots, 0 }

// drop takes a place off the agent's list. There are few, and they lie side by side: looking costs less than links would.
func (a *agent) drop(p *place) {
	last := len(a.places) - 1
	a.places[slices.Index(a.places, p)] = a.places[last]
	a.places[last] = nil
	a.places = a.places[:last]
}

func (a *agent) ready() bool { return a.seen && a.accepting && !a.hearing.alone() }

// refresh makes the index show the agent as it is.
func (a *agent) refresh() {
	ready := a.ready()
	a.setFull(ready && a.allocated >= a.capacity)
	if ready && !a.full {
		a.pool.index.Offer(a.id, placement.RankOf(a.allocated, a.freeSlots() > 0))
		return
	}
	a.pool.index.Withdraw(a.id)
}

func (a *agent) setFull(full bool) {
	if a.full == full {
		return
	}
	a.full = full
	if full {
		a.pool.full++
	} else {
		a.pool.full--
	}
}

func (a *agent) takePorts(ports []int32) {
	for _, p := range ports {
		a.pool.index.Take(a.id, p)
	}
}

func (a *agent) freePorts(ports []int32) {
	for _, p := range ports {
		a.pool.index.Free(a.id, p)
	}
}

// eachPorts calls f with the ports of everyone on the agent.
func (a *agent) eachPorts(f func([]int32)) {
	f(a.ports)
	for _, p := range a.places {
		f(p.ports)
	}
}

func (a *agent) setAccepting(accepting bool, reason string) {
	a.accepting = accepting
	a.reason = ""
	if !accepting {
		if a.reason = reason; reason == "" {
			a.reason = reasonRefusing
		}
	}
}

func (a *agent) view() View {
	v := View{
		UID: a.uid, Pool: a.pool.name, Capacity: a.capacity, Allocated: a.allocated, FreeSlots: a.freeSlots(),
		Images: a.pool.index.Images(a.id), Ready: a.ready(), LastHeartbeat: a.heard,
	}
	switch {
	case !a.seen:
		v.Reason = ReasonConnecting
	case a.hearing.alone():
		v.Reason = ReasonHeartbeat
	case !a.accepting:
		v.Reason = a.reason
	}
	return v
}

// Agent returns the state of one agent; false if it is not known.
func (r *Registry) Agent(now time.Time, uid string) (View, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	a, ok := r.agents[uid]
	if !ok {
		return View{}, false
	}
	return a.view(), true
}

// Agents returns the state of every agent, in no order.
func (r *Registry) Agents(now time.Time) []View {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	views := make([]View, 0, len(r.agents))
	for _, a := range r.agents {
		views = append(views, a.view())
	}
	return views
}
