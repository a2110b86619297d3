package observe

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// agent returns the state of an agent's Pod according to the caches.
func (v *evidence) agent(uid string, now time.Time) verdict.Agent {
	return v.agents.state(uid, v.unready() == nil, now)
}

// ofSandbox reports whether a container can have a Sandbox.
func ofSandbox(c Container) bool {
	return c.Defect == "" && c.Identity.State == identity.StateClaimed
}

// resource returns a container's Sandbox from the cache, or a fresher answer of the API server.
func (v *evidence) resource(e *entry, now time.Time) resource {
	if !ofSandbox(e.container) || !v.synced {
		return resource{}
	}
	if r, ok := v.resources[nameOf(e.container.Identity)]; ok {
		return r
	}
	if now.Before(e.liveUntil) {
		return e.live
	}
	return resource{Resource: verdict.Resource{State: verdict.ResourceAbsent}}
}

// judge judges a container by the cached state, records the finding, and schedules what follows from it.
func (v *evidence) judge(e *entry, now time.Time) {
	uid := e.container.Identity.AgentUID
	agent := verdict.AgentUnknown
	if uid != "" {
		agent = v.agent(uid, now)
	}
	v.conclude(e, agent, v.resource(e, now), now)
}

// conclude judges a container by the state of its agent and of its Sandbox.
func (v *evidence) conclude(e *entry, agent verdict.Agent, r resource, now time.Time) {
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
		Key: Key{ID: c.ID}, Observation: o, Verdict: verdict.Decide(*o, v.config.Policy), Time: now, ResourceUID: r.uid,
		Orphan: e.last.Orphan, Traceparent: e.last.Traceparent,
	}
	changed := v.mark(&f, e.last.Verdict, e.last.Observation == nil, now)
	if !changed && !same(e.last.Observation, o) {
		v.notify()
	}
	e.last = f
	if d := v.again(f, o); d > 0 {
		v.looks.AddAfter(look{key: f.Key}, d)
	}
	v.recheckLive(e, now)
}

// mark records since when a finding is an orphan, reports it, and notifies about new verdicts.
func (v *evidence) mark(f *Finding, before verdict.Verdict, first bool, now time.Time) bool {
	switch {
	case f.Verdict.Action != verdict.Delete:
		f.Orphan = time.Time{}
	case f.Orphan.IsZero():
		f.Orphan = now
		v.config.Log.V(2).Info("orphan found", obs.KeyContainer, f.Key.ID, obs.KeyReason, f.Verdict.Reason.String(), obs.KeyRemnant, f.Key.Remnant)
		v.orphan(f.Key)
	}
	if !first && f.Verdict == before {
		return false
	}
	v.notify()
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

// again returns when a verdict may change because time passes; zero for never.
func (v *evidence) again(f Finding, o *verdict.Observation) time.Duration {
	grace := v.config.Policy.Grace
	switch f.Verdict.Reason {
	case verdict.WithinGrace:
		return max(grace-o.Missing, min(grace-o.Age, grace), time.Millisecond)
	case verdict.AgentPodUnknown:
		if v.agents.undecided(o.Identity.AgentUID) {
			return grace
		}
	}
	return 0
}

// judgeAgent judges everything that names an agent.
func (v *evidence) judgeAgent(uid string) {
	now := v.clock.Now()
	for _, e := range v.inventory.byAgent[uid] {
		v.judge(e, now)
	}
	for _, r := range v.inventory.remnants {
		if r.ownedBy(uid) {
			v.judgeRemnant(r, now)
		}
	}
}

// judgeName judges all containers of one name.
func (v *evidence) judgeName(n name) {
	now := v.clock.Now()
	for _, e := range v.inventory.byName[n] {
		v.judge(e, now)
	}
}

// judgeAll judges everything, and reports orphans again.
func (v *evidence) judgeAll() {
	now := v.clock.Now()
	for _, e := range v.inventory.containers {
		v.judge(e, now)
		v.remind(&e.last)
	}
	for _, r := range v.inventory.remnants {
		v.judgeRemnant(r, now)
		v.remind(&r.last)
	}
}

// remind reports an orphan again, and what only the API server's own answer can decide.
func (v *evidence) remind(f *Finding) {
	if f.Verdict.Action == verdict.Delete || f.Verdict.Reason == verdict.CreateInFlight {
		v.orphan(f.Key)
	}
}

// orphan reports an orphan once it can be confirmed.
func (v *evidence) orphan(key Key) {
	if v.unready() == nil {
		v.config.Orphan(key)
	}
}

// judgeRemnant judges a remnant by the cached state.
func (v *evidence) judgeRemnant(r *remnant, now time.Time) {
	v.concludeRemnant(r, func(uid string) verdict.Agent { return v.agent(uid, now) }, now)
}

// concludeRemnant judges the pieces of a remnant; the most careful verdict wins.
func (v *evidence) concludeRemnant(r *remnant, agent func(uid string) verdict.Agent, now time.Time) {
	f := r.last
	f.Time, f.Remnant = now, nil
	for _, p := range r.last.Pieces {
		o := &verdict.Remnant{ContainerID: f.Key.ID, Kind: f.Key.Kind, Since: now.Sub(r.since)}
		if p.Owner != "" {
			o.Agent = agent(p.Owner)
		}
		if o.Kind == verdict.Log {
			// A log directory without an owner file is one whose removal was interrupted.
			o.Deleted = !p.Deleted.IsZero() || p.Owner == ""
			if o.DeletedAge = now.Sub(p.Written); !p.Deleted.IsZero() {
				o.DeletedAge = now.Sub(p.Deleted)
			}
		}
		if v := verdict.DecideRemnant(*o, v.config.Policy); f.Remnant == nil || v.Action < f.Verdict.Action {
			f.Remnant, f.Verdict = o, v
		}
	}
	v.mark(&f, r.last.Verdict, r.last.Remnant == nil, now)
	r.last = f
}
