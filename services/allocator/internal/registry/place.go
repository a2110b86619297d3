package registry

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// place is one sandbox's place on one agent. Places are used again, so that none may be touched after free.
type place struct {
	key      identity.Fence
	agent    *agent
	ports    []int32
	reported bool
	reserved bool
	until    time.Time
	// twin and elder chain places of the same key on different agents. The one without an elder answers for the key.
	twin, elder *place
	expiring    node[place]
	snapshot    uint64 // the last snapshot that listed it
}

// maxSpare bounds the places that are kept for use, to about 1 MiB.
const maxSpare = 4096

// on returns the place that an agent has among those of a key, nil if there is none.
func (p *place) on(a *agent) *place {
	for p != nil && p.agent != a {
		p = p.twin
	}
	return p
}

// take takes a place for a key that has none on the agent. first is the place that answers for the key, nil if there is
// none; the new one answers in its stead if it leads.
func (r *Registry) take(a *agent, key identity.Fence, ports []int32, first *place, leads bool) *place {
	var p *place
	if n := len(r.spare); n > 0 {
		p = r.spare[n-1]
		r.spare = r.spare[:n-1]
	} else {
		p = &place{}
		p.expiring.init(p)
	}
	p.key, p.agent = key, a
	p.ports = append(p.ports[:0], ports...)
	if first == nil || leads {
		r.lead(p, first)
	} else {
		p.behind(first)
	}
	a.places = append(a.places, p)
	a.allocated++
	a.takePorts(p.ports)
	return p
}

// lead makes a place, which is in no chain, answer for its key before the others of the key, if any.
func (r *Registry) lead(p, first *place) {
	p.twin, p.elder = first, nil
	if first != nil {
		first.elder = p
	}
	r.byKey.put(p)
}

// behind chains a place behind another one of its key.
func (p *place) behind(first *place) {
	p.twin, p.elder = first.twin, first
	if p.twin != nil {
		p.twin.elder = p
	}
	first.twin = p
}

// unchain takes a place away from its key.
func (r *Registry) unchain(p *place) {
	switch {
	case p.elder != nil:
		p.elder.twin = p.twin
	case p.twin != nil:
		r.byKey.put(p.twin)
	default:
		r.byKey.remove(p.key)
	}
	if p.twin != nil {
		p.twin.elder = p.elder
	}
	p.twin, p.elder = nil, nil
}

// reserve keeps a place until the reservation is over, counted from now. The lock is held.
func (r *Registry) reserve(now time.Time, p *place) {
	if !p.reserved {
		p.reserved = true
		if !p.reported {
			p.agent.pending++
		}
	}
	p.until = now.Add(r.reservation)
	p.expiring.leave()
	at := r.expiry.prev
	for at != &r.expiry && at.owner.until.After(p.until) {
		at = at.prev
	}
	p.expiring.follow(at)
}

// unreserve ends a reservation, if there is one, and frees the place if the agent does not report it. The agent must be
// refreshed afterwards.
func (r *Registry) unreserve(p *place) {
	if p.reserved {
		p.reserved = false
		p.expiring.leave()
		if !p.reported {
			p.agent.pending--
		}
	}
	r.free(p)
}

// release is unreserve for a single place.
func (r *Registry) release(p *place) {
	a := p.agent
	r.unreserve(p)
	a.refresh()
}

// free removes a place that nobody holds any more.
func (r *Registry) free(p *place) {
	if p.reported || p.reserved {
		return
	}
	r.unchain(p)
	p.agent.drop(p)
	p.agent.allocated--
	p.agent.freePorts(p.ports)
	p.key, p.agent = identity.Fence{}, nil
	if len(r.spare) < maxSpare {
		r.spare = append(r.spare, p)
	}
}
