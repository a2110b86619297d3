package registry

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Sandbox is an agent's report of one sandbox.
type Sandbox struct {
	// Fence names the container. Its AgentUID is ignored: the agent is the one that reports.
	Fence identity.Fence
	// Ports that the sandbox has on its agent.
	Ports []int32
	// Demand counts against the quotas of the namespace, unless the attempt was reserved with one.
	Demand Demand
	// Ended is set if the sandbox holds no capacity and no ports: its process has ended or never started, or its container
	// was removed.
	Ended bool
}

// Snapshot is an agent's whole state.
type Snapshot struct {
	UID      string
	Pool     Pool
	Capacity int
	// FreeSlots is the number of slots that are started and unclaimed.
	FreeSlots     int
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
	// FreeSlots is the number of slots that are started and unclaimed after the change of Sandboxes; nil if unchanged.
	FreeSlots *int
	// Accepting is nil if unchanged.
	Accepting *bool
	Reason    string
}

// ApplySnapshot replaces what is known about an agent: sandboxes that it does not list are removed from it. Reservations stay
// until they are reported or expire, for a create may be on its way. An unknown agent joins.
func (r *Registry) ApplySnapshot(now time.Time, s Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	a := r.join(s.UID, s.Pool)
	a.freePorts(a.ports)
	a.ports = append(a.ports[:0], s.ReservedPorts...)
	a.takePorts(a.ports)
	a.capacity = s.Capacity
	a.seen = true
	r.beat(now, a)
	a.setAccepting(s.Accepting, s.Reason)
	a.pool.index.ClearImages(a.id)
	for _, image := range s.Images {
		a.pool.index.AddImage(a.id, image)
	}
	r.epoch++
	for i := range s.Sandboxes {
		r.report(a, &s.Sandboxes[i])
	}
	for i := len(a.allocations) - 1; i >= 0; i-- { // backwards: drop moves the last one into the gap
		if l := a.allocations[i]; l.reported && l.snapshot != r.epoch {
			r.unreport(l)
		}
	}
	a.setSlots(s.FreeSlots)
	a.refresh()
}

// ApplyDelta applies a change to an agent. It returns false, and changes nothing, for an agent without a snapshot.
func (r *Registry) ApplyDelta(now time.Time, d Delta) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	a, ok := r.agents[d.UID]
	if !ok || !a.seen {
		return false
	}
	r.beat(now, a)
	if d.Accepting != nil {
		a.setAccepting(*d.Accepting, d.Reason)
	}
	for _, image := range d.ImagesRemoved {
		a.pool.index.RemoveImage(a.id, image)
	}
	for _, image := range d.ImagesAdded {
		a.pool.index.AddImage(a.id, image)
	}
	for i := range d.Sandboxes {
		r.report(a, &d.Sandboxes[i])
	}
	if d.FreeSlots != nil {
		a.setSlots(*d.FreeSlots)
	}
	a.refresh()
	return true
}

// Heartbeat records a message of an agent that carries no change. An agent that is unknown, or has sent no snapshot, stays as
// it is.
func (r *Registry) Heartbeat(now time.Time, uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if a, ok := r.agents[uid]; ok && a.seen {
		silent := a.beating.alone()
		r.beat(now, a)
		if silent {
			a.refresh()
		}
	}
}

// report applies an agent's report of one sandbox. It confirms a reservation and ends its expiry: from here on the agent
// decides when the capacity is free. The caller refreshes the agent.
func (r *Registry) report(a *agent, sb *Sandbox) {
	key := attemptOf(sb.Fence)
	first := r.attempts.first(key)
	l := first.on(a)
	switch {
	case sb.Ended:
		if l != nil {
			r.end(l)
		}
		return
	case l == nil:
		l = r.take(a, hold{key, sb.Ports, sb.Demand}, first, false)
	default:
		a.freePorts(l.ports)
		l.ports = append(l.ports[:0], sb.Ports...)
		a.takePorts(l.ports)
		if l.reserved && !l.reported {
			a.pending--
			a.claimed++
		}
	}
	l.reported = true
	l.snapshot = r.epoch
	r.unreserve(l)
}

// end frees an allocation, reserved or not.
func (r *Registry) end(l *allocation) {
	reported := l.reported
	r.unreserve(l)
	if reported {
		l.reported = false
		r.free(l)
	}
}

// unreport removes the report of an allocation. Its reservation, if there is one, stays.
func (r *Registry) unreport(l *allocation) {
	l.reported = false
	if l.reserved {
		l.agent.pending++
	}
	r.free(l)
}
