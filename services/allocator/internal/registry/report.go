package registry

import (
	"time"
)

// ApplySnapshot replaces what is known of an agent by its own word: sandboxes that it does not list are gone from it.
// Reservations stay until they are reported or over, for a create may be on its way. An unknown agent joins.
func (r *Registry) ApplySnapshot(now time.Time, s Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	a := r.join(s.UID, s.Pool)
	a.release(a.reserved)
	a.reserved = append([]int32(nil), s.ReservedPorts...)
	a.take(a.reserved)
	a.Capacity = s.Capacity
	a.seen = true
	a.Heard = now.UnixNano()
	a.setAccepting(s.Accepting, s.Reason)
	clear(a.Images)
	for _, image := range s.Images {
		a.Images[image] = struct{}{}
	}
	listed := make(map[Key]bool, len(s.Sandboxes))
	for _, sb := range s.Sandboxes {
		listed[sb.Key] = !sb.Gone
		r.report(a, sb)
	}
	for key, p := range a.places {
		if p.reported && !listed[key] {
			p.reported = false
			r.free(p)
		}
	}
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
	a.Heard = now.UnixNano()
	if d.Accepting != nil {
		a.setAccepting(*d.Accepting, d.Reason)
	}
	for _, image := range d.ImagesRemoved {
		delete(a.Images, image)
	}
	for _, image := range d.ImagesAdded {
		a.Images[image] = struct{}{}
	}
	for _, sb := range d.Sandboxes {
		r.report(a, sb)
	}
	return true
}

// Heartbeat notes that an agent was heard of. An unknown agent, or one without a snapshot, stays what it is.
func (r *Registry) Heartbeat(now time.Time, uid string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if a, ok := r.agents[uid]; ok && a.seen {
		a.Heard = now.UnixNano()
	}
}

// report takes an agent's word on one place. A report confirms a reservation and ends its expiry: from here on the agent
// says when the place is free.
func (r *Registry) report(a *agent, sb Sandbox) {
	p, ok := a.places[sb.Key]
	if sb.Gone {
		if ok {
			p.reported = false
			r.unreserve(p)
		}
		return
	}
	if !ok {
		p = &place{key: sb.Key, agent: a}
		a.places[sb.Key] = p
		a.Allocated++
	}
	a.release(p.ports)
	p.ports = append([]int32(nil), sb.Ports...)
	a.take(p.ports)
	p.reported = true
	r.unreserve(p)
	if r.byKey[sb.Key] == nil {
		r.byKey[sb.Key] = p
	}
}

func (a *agent) setAccepting(accepting bool, reason string) {
	a.Accepting = accepting
	a.reason = ""
	if !accepting {
		if a.reason = reason; reason == "" {
			a.reason = reasonRefusing
		}
	}
}

func (r *Registry) readiness(a *agent, now time.Time) (bool, string) {
	switch {
	case !a.seen:
		return false, ReasonConnecting
	case a.Heard < now.Add(-r.heartbeat).UnixNano():
		return false, ReasonHeartbeat
	case !a.Accepting:
		return false, a.reason
	}
	return true, ""
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
	return r.view(a, now), true
}

// Agents returns the state of every agent, in no order.
func (r *Registry) Agents(now time.Time) []View {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	views := make([]View, 0, len(r.agents))
	for _, a := range r.agents {
		views = append(views, r.view(a, now))
	}
	return views
}

func (r *Registry) view(a *agent, now time.Time) View {
	v := View{UID: a.UID, Pool: a.pool, Capacity: a.Capacity, Allocated: a.Allocated, Images: len(a.Images)}
	v.Ready, v.Reason = r.readiness(a, now)
	if a.Heard != 0 {
		v.Heard = time.Unix(0, a.Heard)
	}
	return v
}
