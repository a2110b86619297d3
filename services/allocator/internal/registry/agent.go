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
	// FreeSlots is the number of slots that the agent has reported and no sandbox has claimed or is about to claim.
	FreeSlots int
	// Images is the number of images on the agent's node.
	Images int
	Ready  bool
	// Reason says why the agent is not ready; empty while it is.
	Reason string
	// LastHeartbeat is the time of the agent's last message; zero if there was none.
	LastHeartbeat time.Time
}

// pool is the agents of one pool.
type pool struct {
	name   Pool
	space  *space
	index  *index.Index
	agents []*agent // by number in the index; nil for one that has left
	full   int      // ready agents without free capacity
}

// agent keeps what an allocation touches together: with very many agents, a page that is not in the processor's tables
// costs as much as all the arithmetic.
type agent struct {
	uid       string
	pool      *pool
	id        index.ID
	seen      bool // a snapshot was received
	accepting bool
	full      bool        // the pool counts it as full
	beating   node[agent] // alone while the agent is silent

	capacity, allocated int
	// A slot is taken from the reservation until the agent's own count shows it: first as a pending allocation (reserved, not
	// reported), which no count can include yet, then as a claimed one (reported since the last count). A reservation that
	// fails is no longer pending and leaves the slot free.
	slots            int // by the agent's last report
	pending, claimed int

	allocations []*allocation   // in no order
	few         [16]*allocation // storage of the first allocations

	lastHeartbeat time.Time
	ports         []int32 // of the agent itself
	reason        string
}

func (a *agent) freeSlots() int { return max(0, a.slots-a.pending-a.claimed) }

// setSlots records the agent's count of its free slots.
func (a *agent) setSlots(slots int) { a.slots, a.claimed = slots, 0 }

// drop removes an allocation from the agent's list. The list is short and contiguous, so a search costs less than links.
func (a *agent) drop(l *allocation) {
	last := len(a.allocations) - 1
	a.allocations[slices.Index(a.allocations, l)] = a.allocations[last]
	a.allocations[last] = nil
	a.allocations = a.allocations[:last]
}

func (a *agent) ready() bool { return a.seen && a.accepting && !a.beating.alone() }

// refresh updates the index from the agent's state.
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

// eachPorts calls f with the agent's own ports and those of each allocation.
func (a *agent) eachPorts(f func([]int32)) {
	f(a.ports)
	for _, l := range a.allocations {
		f(l.ports)
	}
}

func (a *agent) setAccepting(accepting bool, reason string) {
	a.accepting = accepting
	a.reason = ""
	if !accepting {
		if a.reason = reason; reason == "" {
			a.reason = reasonNotAccepting
		}
	}
}

func (a *agent) view() View {
	v := View{
		UID: a.uid, Pool: a.pool.name, Capacity: a.capacity, Allocated: a.allocated, FreeSlots: a.freeSlots(),
		Images: a.pool.index.Images(a.id), Ready: a.ready(), LastHeartbeat: a.lastHeartbeat,
	}
	switch {
	case !a.seen:
		v.Reason = ReasonConnecting
	case a.beating.alone():
		v.Reason = ReasonHeartbeat
	case !a.accepting:
		v.Reason = a.reason
	}
	return v
}

// Agent returns the state of one agent, and whether it is known.
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

// Images returns the images on an agent's node, in no order; none for an unknown agent.
func (r *Registry) Images(uid string) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	a, ok := r.agents[uid]
	if !ok {
		return nil
	}
	return a.pool.index.ImagesOf(a.id)
}
