package agents

import (
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// begin starts a reading of the Registry. Until SYNCED the last reading stands, unsynced.
func (x *Index) begin() {
	x.mu.Lock()
	defer x.mu.Unlock()
	fresh := newContent()
	x.synced, x.staging = false, &fresh
}

// end marks that the stream has broken. What was read stays, as the last word.
func (x *Index) end() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.synced, x.staging = false, nil
}

// apply takes one message of the stream in and tells the subscribers.
func (x *Index) apply(m *allocatorv1.WatchAgentsResponse) {
	ch, subscribers := x.update(m)
	for _, s := range subscribers {
		if s.Synced != nil && ch.synced {
			s.Synced()
		}
		for n := range ch.sandboxes {
			if s.Sandbox != nil {
				s.Sandbox(n)
			}
		}
		for n := range ch.pools {
			if s.Pool != nil {
				s.Pool(n)
			}
		}
	}
}

func (x *Index) update(m *allocatorv1.WatchAgentsResponse) (changes, []Subscriber) {
	now := x.clock.Now()
	ch := newChanges()
	x.mu.Lock()
	defer x.mu.Unlock()
	target := &x.live
	if x.staging != nil {
		target = x.staging
	}
	uid := m.GetAgent().GetInfo().GetPodUid()
	switch m.GetType() {
	case allocatorv1.WatchAgentsResponse_TYPE_AGENT:
		target.putAgent(uid, m.GetAgent(), m.GetSandboxes(), now, ch)
	case allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES:
		target.putSandboxes(uid, m, now, ch)
	case allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE:
		target.dropAgent(uid, ch)
	case allocatorv1.WatchAgentsResponse_TYPE_SYNCED:
		x.swap(ch)
		ch.synced = true
	case allocatorv1.WatchAgentsResponse_TYPE_UNSPECIFIED:
	}
	if x.staging != nil { // nobody sees it yet
		return changes{}, nil
	}
	return ch, x.subscribers
}

// swap makes the staged reading the live one. Whatever was or is known may have changed.
func (x *Index) swap(ch changes) {
	if x.staging == nil {
		return
	}
	for _, c := range []*content{&x.live, x.staging} {
		for _, e := range c.agents {
			ch.pools[e.pool()] = true
			for _, r := range e.reports {
				ch.sandbox(r.SandboxReport)
			}
		}
	}
	x.live, x.staging, x.synced = *x.staging, nil, true
}

func (c *content) putAgent(uid string, a *allocatorv1.Agent, reports []*agentv1.SandboxReport, now time.Time, ch changes) {
	if uid == "" {
		return
	}
	e := c.agents[uid]
	if e == nil {
		e = &entry{agent: a, reports: map[reportKey]*report{}}
		c.agents[uid] = e
	}
	standingChanged := e.agent.GetReady() != a.GetReady() || e.agent.GetReason() != a.GetReason()
	e.agent = a
	ch.pools[e.pool()] = true
	listed := make(map[reportKey]bool, len(reports))
	for _, r := range reports {
		listed[keyOf(r)] = true
		c.put(uid, e, r, now, ch)
	}
	for k, r := range e.reports {
		if !listed[k] {
			if r.goneAt.IsZero() {
				ch.sandbox(r.SandboxReport)
			}
			c.forget(uid, e, k)
		} else if standingChanged {
			ch.sandbox(r.SandboxReport)
		}
	}
}

func (c *content) putSandboxes(uid string, m *allocatorv1.WatchAgentsResponse, now time.Time, ch changes) {
	e := c.agents[uid]
	if e == nil { // the allocator sends an agent before its sandboxes
		return
	}
	if m.GetAgent() != nil {
		e.agent = m.GetAgent()
	}
	for _, r := range m.GetSandboxes() {
		c.put(uid, e, r, now, ch)
	}
	for k, r := range e.reports {
		if !r.goneAt.IsZero() && now.Sub(r.goneAt) > tombstoneTime {
			c.forget(uid, e, k)
		}
	}
	ch.pools[e.pool()] = true
}

func (c *content) put(uid string, e *entry, r *agentv1.SandboxReport, now time.Time, ch changes) {
	k := keyOf(r)
	old := e.reports[k]
	if old != nil && proto.Equal(old.SandboxReport, r) {
		return
	}
	fresh := &report{SandboxReport: r}
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		fresh.goneAt = now
	}
	e.reports[k] = fresh
	if c.bySbx[k.uid] == nil {
		c.bySbx[k.uid] = map[string]bool{}
	}
	c.bySbx[k.uid][uid] = true
	ch.sandbox(r)
}

func (c *content) forget(uid string, e *entry, k reportKey) {
	delete(e.reports, k)
	for other := range e.reports {
		if other.uid == k.uid {
			return
		}
	}
	delete(c.bySbx[k.uid], uid)
	if len(c.bySbx[k.uid]) == 0 {
		delete(c.bySbx, k.uid)
	}
}

func (c *content) dropAgent(uid string, ch changes) {
	e := c.agents[uid]
	if e == nil {
		return
	}
	ch.pools[e.pool()] = true
	for k, r := range e.reports {
		ch.sandbox(r.SandboxReport)
		c.forget(uid, e, k)
	}
	delete(c.agents, uid)
}
