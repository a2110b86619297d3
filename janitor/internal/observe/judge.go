package observe

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// agent returns the state of an agent's Pod according to the caches. mu is held.
func (s *NodeState) agent(uid string, now time.Time) verdict.Agent {
	return s.agents.state(uid, s.unready() == nil, now)
}

// ofSandbox reports whether a container can have a Sandbox.
func ofSandbox(c Container) bool {
	return c.Defect == "" && c.Identity.State == identity.StateClaimed
}

// resource returns a container's Sandbox from the cache, or a fresher answer of the API server. mu is held.
func (s *NodeState) resource(e *entry, now time.Time) resource {
	if !ofSandbox(e.container) || !s.synced {
		return resource{}
	}
	if r, ok := s.resources[nameOf(e.container.Identity)]; ok {
		return r
	}
	if now.Before(e.liveUntil) {
		return e.live
	}
	return resource{Resource: verdict.Resource{State: verdict.ResourceAbsent}}
}

// judge judges a container by the cached state, records the finding, and schedules what follows from it. mu is held.
func (s *NodeState) judge(e *entry, now time.Time) {
	uid := e.container.Identity.AgentUID
	agent := verdict.AgentUnknown
	if uid != "" {
		agent = s.agent(uid, now)
	}
	s.conclude(e, agent, s.resource(e, now), now)
}

// conclude judges a container by the state of its agent and of its Sandbox. mu is held.
func (s *NodeState) conclude(e *entry, agent verdict.Agent, r resource, now time.Time) {
	c := e.container
	o := &verdict.Observation{
		ContainerID: c.ID, Managed: c.Managed, Identity: c.Identity, Defect: c.Defect, Container: c.State,
		Age: now.Sub(c.CreatedAt), Agent: agent, Resource: r.Resource,
	}
	if r.State != verdict.ResourceAbsent {
		e.missing = time.Time{}
	} else {
		if e.missing.IsZero() {
			e.missing, e.askAfter = now, now.Add(recheckInterval)
		}
		o.Missing = now.Sub(e.missing)
	}
	f := Finding{
		Key: Key{ID: c.ID}, Observation: o, Verdict: verdict.Decide(*o, s.config.Policy), Time: now, ResourceUID: r.uid,
		Orphan: e.last.Orphan, Traceparent: e.last.Traceparent,
	}
	changed := s.mark(&f, e.last.Verdict, e.last.Observation == nil, now)
	if !changed && !same(e.last.Observation, o) {
		s.notify()
	}
	e.last = f
	if d := s.again(f, o); d > 0 {
		s.looks.AddAfter(look{key: f.Key}, d)
	}
	s.recheckLive(e, now)
}

// mark records since when a finding is an orphan, reports it, and notifies about new verdicts. mu is held.
func (s *NodeState) mark(f *Finding, before verdict.Verdict, first bool, now time.Time) bool {
	switch {
	case f.Verdict.Action != verdict.Delete:
		f.Orphan = time.Time{}
	case f.Orphan.IsZero():
		f.Orphan = now
		s.config.Log.V(2).Info("orphan found", obs.KeyContainer, f.Key.ID, obs.KeyReason, f.Verdict.Reason.String(), obs.KeyRemnant, f.Key.Remnant)
		s.orphan(f.Key)
	}
	if !first && f.Verdict == before {
		return false
	}
	s.notify()
	return true
}

// same reports whether two observations differ only in times.
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

// again returns when a verdict may change because time passes; zero for never. mu is held.
func (s *NodeState) again(f Finding, o *verdict.Observation) time.Duration {
	grace := s.config.Policy.Grace
	switch f.Verdict.Reason {
	case verdict.WithinGrace:
		return max(grace-o.Missing, min(grace-o.Age, grace), time.Millisecond)
	case verdict.AgentPodUnknown:
		if s.agents.undecided(o.Identity.AgentUID) {
			return grace
		}
	}
	return 0
}
