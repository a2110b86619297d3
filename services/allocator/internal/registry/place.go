package registry

import "time"

// place is one sandbox's place on one agent. Places are used again, so that none may be touched after free.
type place struct {
	key      Key
	agent    *agent
	ports    []int32
	reported bool
	reserved bool
	until    time.Time
	twin     *place // another place of the same key, on another agent
	expiring node[place]
	beside   node[place] // among the places of its agent
	snapshot uint64      // the last snapshot that listed it
}

// maxSpare bounds the places that are kept for use, to about 1 MiB.
const maxSpare = 4096

// on returns the place of a key on an agent, nil if there is none.
func (r *Registry) on(a *agent, key Key) *place {
	p := r.byKey[key]
	for p != nil && p.agent != a {
		p = p.twin
	}
	return p
}

// take takes a place for a key that has none on the agent. The newest place of a key comes first if it is `current`.
func (r *Registry) take(a *agent, key Key, ports []int32, current bool) *place {
	var p *place
	if n := len(r.spare); n > 0 {
		p = r.spare[n-1]
		r.spare = r.spare[:n-1]
	} else {
		p = &place{}
		p.expiring.init(p)
		p.beside.init(p)
	}
	p.key, p.agent = key, a
	p.ports = append(p.ports[:0], ports...)
	if first := r.byKey[key]; first != nil && !current {
		p.twin, first.twin = first.twin, p
	} else {
		p.twin = first
		r.byKey[key] = p
	}
	p.beside.follow(a.places.prev)
	a.allocated++
	a.takePorts(p.ports)
	return p
}

// lead makes a place the first of its key.
func (r *Registry) lead(p *place) {
	if r.byKey[p.key] == p {
		return
	}
	r.unchain(p)
	p.twin = r.byKey[p.key]
	r.byKey[p.key] = p
}

func (r *Registry) unchain(p *place) {
	first := r.byKey[p.key]
	if first == p {
		if p.twin == nil {
			delete(r.byKey, p.key)
		} else {
			r.byKey[p.key] = p.twin
		}
		return
	}
	for first.twin != p {
		first = first.twin
	}
	first.twin = p.twin
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

// free removes a place that nobody holds any more.
func (r *Registry) free(p *place) {
	if p.reported || p.reserved {
		return
	}
	r.unchain(p)
	p.beside.leave()
	p.agent.allocated--
	p.agent.freePorts(p.ports)
	p.key, p.agent, p.twin = Key{}, nil, nil
	if len(r.spare) < maxSpare {
		r.spare = append(r.spare, p)
	}
}
