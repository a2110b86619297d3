package registry

import "time"

// allocation is one unit of an agent's capacity that an attempt has taken. Allocations are reused: none may be touched after
// free.
type allocation struct {
	key      attempt
	agent    *agent
	ports    []int32
	demand   Demand
	reported bool
	reserved bool
	until    time.Time // end of the reservation
	// next and prev link the allocations of one attempt on different agents. The first of them answers for the attempt.
	next, prev *allocation
	expiring   node[allocation]
	snapshot   uint64 // the last snapshot that listed it
}

// maxSpare bounds the allocations that are kept for reuse, to about 1 MiB.
const maxSpare = 4096

// on returns the allocation on an agent among those of an attempt, or nil.
func (l *allocation) on(a *agent) *allocation {
	for l != nil && l.agent != a {
		l = l.next
	}
	return l
}

// hold is what an attempt holds on an agent.
type hold struct {
	key    attempt
	ports  []int32
	demand Demand
}

// take adds an allocation for an attempt that has none on the agent. first answers for the attempt, nil if it has no
// allocation; the new one answers instead if lead is set.
func (r *Registry) take(a *agent, h hold, first *allocation, lead bool) *allocation {
	var l *allocation
	if n := len(r.spare); n > 0 {
		l = r.spare[n-1]
		r.spare = r.spare[:n-1]
	} else {
		l = &allocation{}
		l.expiring.init(l)
	}
	l.key, l.agent = h.key, a
	l.ports = append(l.ports[:0], h.ports...)
	l.demand = h.demand.bounded()
	if first == nil || lead {
		r.linkFirst(l, first)
	} else {
		l.linkAfter(first)
	}
	a.allocations = append(a.allocations, l)
	a.allocated++
	a.takePorts(l.ports)
	a.pool.space.charge(l.demand)
	return l
}

// linkFirst makes an allocation, which is not linked, answer for its attempt.
func (r *Registry) linkFirst(l, first *allocation) {
	l.next, l.prev = first, nil
	if first != nil {
		first.prev = l
	}
	r.attempts.put(l)
}

func (l *allocation) linkAfter(first *allocation) {
	l.next, l.prev = first.next, first
	if l.next != nil {
		l.next.prev = l
	}
	first.next = l
}

// unlink removes an allocation from those of its attempt.
func (r *Registry) unlink(l *allocation) {
	switch {
	case l.prev != nil:
		l.prev.next = l.next
	case l.next != nil:
		r.attempts.put(l.next)
	default:
		r.attempts.remove(l.key)
	}
	if l.next != nil {
		l.next.prev = l.prev
	}
	l.next, l.prev = nil, nil
}

// reserve reserves an allocation, or extends its reservation, from now.
func (r *Registry) reserve(now time.Time, l *allocation) {
	if !l.reserved {
		l.reserved = true
		if !l.reported {
			l.agent.pending++
		}
	}
	l.until = now.Add(r.reservation)
	l.expiring.leave()
	at := r.expiry.prev
	for at != &r.expiry && at.owner.until.After(l.until) {
		at = at.prev
	}
	l.expiring.follow(at)
}

// unreserve ends a reservation, if there is one, and frees the allocation unless the agent reports it. The caller refreshes
// the agent.
func (r *Registry) unreserve(l *allocation) {
	if l.reserved {
		l.reserved = false
		l.expiring.leave()
		if !l.reported {
			l.agent.pending--
		}
	}
	r.free(l)
}

// release is unreserve followed by refresh.
func (r *Registry) release(l *allocation) {
	a := l.agent
	r.unreserve(l)
	a.refresh()
}

// free removes an allocation that is neither reserved nor reported.
func (r *Registry) free(l *allocation) {
	if l.reported || l.reserved {
		return
	}
	r.unlink(l)
	l.agent.drop(l)
	l.agent.allocated--
	l.agent.freePorts(l.ports)
	l.agent.pool.space.discharge(l.demand)
	l.key, l.agent = attempt{}, nil
	if len(r.spare) < maxSpare {
		r.spare = append(r.spare, l)
	}
}
