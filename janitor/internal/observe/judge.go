package observe

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// agent is what the caches say of an agent's Pod. mu is held.
func (b *Board) agent(uid string, now time.Time) verdict.Agent {
	if b.pods[uid] {
		delete(b.strangers, uid)
		return verdict.AgentAlive
	}
	if b.unready() != nil {
		return verdict.AgentUnknown
	}
	return b.absentAgent(uid, b.running[uid], now)
}

// absentAgent is what follows from the API server's not having an agent's Pod. One that it had is gone. One that it never had,
// as far as this process knows, may be another cluster's, whose kubelet runs it here; and where nobody runs it for the grace,
// it is gone whoever's it was. mu is held.
func (b *Board) absentAgent(uid string, running bool, now time.Time) verdict.Agent {
	if _, ok := b.known[uid]; ok {
		return verdict.AgentGone
	}
	if running {
		delete(b.strangers, uid)
		return verdict.AgentForeign
	}
	since, ok := b.strangers[uid]
	if !ok {
		since = now
		b.strangers[uid] = now
	}
	if now.Sub(since) < b.config.Policy.Grace {
		return verdict.AgentUnknown
	}
	return verdict.AgentGone
}

// ofSandbox tells whether there is a Sandbox to look for.
func ofSandbox(c Container) bool {
	return c.Defect == "" && c.Identity.State == identity.StateClaimed
}

// resource is what the cache says of a container's Sandbox, or what the API server said past it. mu is held.
func (b *Board) resource(e *entry, now time.Time) resource {
	if !ofSandbox(e.container) || !b.synced {
		return resource{}
	}
	if r, ok := b.resources[nameOf(e.container.Identity)]; ok {
		return r
	}
	if now.Before(e.liveUntil) {
		return e.live
	}
	return resource{Resource: verdict.Resource{State: verdict.ResourceAbsent}}
}

// judge judges a container by what is known, notes the finding, and sees to what follows from it. mu is held.
func (b *Board) judge(e *entry, now time.Time) {
	uid := e.container.Identity.AgentUID
	agent := verdict.AgentUnknown
	if uid != "" {
		agent = b.agent(uid, now)
	}
	b.conclude(e, agent, b.resource(e, now), now)
}

// conclude judges a container by what is known of its agent and its Sandbox. mu is held.
func (b *Board) conclude(e *entry, agent verdict.Agent, r resource, now time.Time) {
	c := e.container
	o := &verdict.Observation{
		ContainerID: c.ID, Managed: c.Managed, Identity: c.Identity, Defect: c.Defect, Container: c.State,
		Age: now.Sub(c.CreatedAt), Agent: agent, Resource: r.Resource,
	}
	if r.State != verdict.ResourceAbsent {
		e.missing = time.Time{}
	} else {
		if e.missing.IsZero() {
			e.missing, e.askAfter = now, now.Add(askInterval)
		}
		o.Missing = now.Sub(e.missing)
	}
	f := Finding{
		Key: Key{ID: c.ID}, Observation: o, Verdict: verdict.Decide(*o, b.config.Policy), Time: now, ResourceUID: r.uid,
		Orphan: e.last.Orphan, Traceparent: e.last.Traceparent,
	}
	changed := b.mark(&f, e.last.Verdict, e.last.Observation == nil, now)
	if !changed && !same(e.last.Observation, o) {
		b.notify()
	}
	e.last = f
	if d := b.again(f, o); d > 0 {
		b.looks.AddAfter(look{key: f.Key}, d)
	}
	b.wonder(e, now)
}

// mark notes since when a finding is an orphan, tells who sweeps of it, and who waits of a new verdict. mu is held.
func (b *Board) mark(f *Finding, before verdict.Verdict, first bool, now time.Time) bool {
	switch {
	case f.Verdict.Action != verdict.Delete:
		f.Orphan = time.Time{}
	case f.Orphan.IsZero():
		f.Orphan = now
		b.config.Log.V(2).Info("orphan found", "container", f.Key.ID, "reason", f.Verdict.Reason.String(), "remnant", f.Key.Remnant)
		b.orphan(f.Key)
	}
	if !first && f.Verdict == before {
		return false
	}
	b.notify()
	return true
}

// same tells whether two observations differ by no more than time.
func same(a, b *verdict.Observation) bool {
	if a == nil || b == nil {
		return a == b
	}
	x, y := *a, *b
	x.Age, y.Age, x.Missing, y.Missing = 0, 0, 0, 0
	if x.Resource.Assignment != nil && y.Resource.Assignment != nil && *x.Resource.Assignment == *y.Resource.Assignment {
		x.Resource.Assignment, y.Resource.Assignment = nil, nil
	}
	return x == y
}

// again is when a verdict may be another by nothing but the time that passes; zero for never. mu is held.
func (b *Board) again(f Finding, o *verdict.Observation) time.Duration {
	grace := b.config.Policy.Grace
	switch f.Verdict.Reason {
	case verdict.WithinGrace:
		return max(grace-o.Missing, min(grace-o.Age, grace), time.Millisecond)
	case verdict.AgentPodUnknown:
		if _, ok := b.strangers[o.Identity.AgentUID]; ok {
			return grace
		}
	}
	return 0
}
