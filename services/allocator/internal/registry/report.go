package registry

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Sandbox is an agent's word on one place.
type Sandbox struct {
	// Fence names the container; its AgentUID is ignored, for the agent is the one that reports.
	Fence identity.Fence
	// Ports that the sandbox has on its agent.
	Ports []int32
	// Gone tells that the place is free again.
	Gone bool
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
	// FreeSlots is the number of slots that are started and unclaimed once Sandboxes are as they are told here; nil if it
	// did not change.
	FreeSlots *int
	// Accepting is nil if it did not change.
	Accepting *bool
	Reason    string
}

// ApplySnapshot replaces what is known of an agent by its own word: sandboxes that it does not list are gone from it.
// Reservations stay until they are reported or over, for a create may be on its way. An unknown agent joins.
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
	r.hear(now, a)
	a.setAccepting(s.Accepting, s.Reason)
	a.pool.index.ClearImages(a.id)
	for _, image := range s.Images {
		a.pool.index.AddImage(a.id, image)
	}
	r.epoch++
	for i := range s.Sandboxes {
		r.report(a, &s.Sandboxes[i])
	}
	for i := len(a.places) - 1; i >= 0; i-- { // backwards, for what goes is replaced by the last
		if p := a.places[i]; p.reported && p.snapshot != r.epoch {
			r.unreport(p)
		}
	}
	a.count(s.FreeSlots)
	a.refresh()
}

// ApplyDelta changes what is known of an agent. It returns false, and changes nothing, for an agent that no snapshot was
// received of.
func (r *Registry) ApplyDelta(now time.Time, d Delta) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	a, ok := r.agents[d.UID]
	if !ok || !a.seen {
		return false
	}
	r.hear(now, a)
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
		a.count(*d.FreeSlots)
	}
	a.refresh()
	return true
}

// Heartbeat notes that an agent was heard of. An unknown agent, or one without a snapshot, stays what it is.
func (r *Registry) Heartbeat(now time.Time, uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if a, ok := r.agents[uid]; ok && a.seen {
		silent := a.hearing.alone()
		r.hear(now, a)
		if silent {
			a.refresh()
		}
	}
}

// report takes an agent's word on one place. A report confirms a reservation and ends its expiry: from here on the agent
// says when the place is free. The agent must be refreshed afterwards.
func (r *Registry) report(a *agent, sb *Sandbox) {
	key := attempt(sb.Fence)
	first := r.byKey.first(key)
	p := first.on(a)
	switch {
	case sb.Gone:
		if p != nil {
			r.gone(p)
		}
		return
	case p == nil:
		p = r.take(a, key, sb.Ports, first, false)
	default:
		a.freePorts(p.ports)
		p.ports = append(p.ports[:0], sb.Ports...)
		a.takePorts(p.ports)
		if p.reserved && !p.reported {
			a.pending--
			a.claimed++
		}
	}
	p.reported = true
	p.snapshot = r.epoch
	r.unreserve(p)
}

// gone takes an agent's word that a place is free, whoever held it.
func (r *Registry) gone(p *place) {
	reported := p.reported
	r.unreserve(p)
	if reported {
		p.reported = false
		r.free(p)
	}
}

// unreport notes that an agent does not know a place any more; a reservation of it stays.
func (r *Registry) unreport(p *place) {
	p.reported = false
	if p.reserved {
		p.agent.pending++
	}
	r.free(p)
}
