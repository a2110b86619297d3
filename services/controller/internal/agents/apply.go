package agents

import (
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// begin starts a reading of the Registry. Until SYNCED, the previous reading is served as unsynced.
func (x *Index) begin() {
	x.mu.Lock()
	defer x.mu.Unlock()
	fresh := newContent()
	x.synced, x.staging = false, &fresh
}

// end records that the stream has ended. The content stays, as unsynced.
func (x *Index) end() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.synced, x.staging = false, nil
}

// apply processes one message of the stream and notifies the subscribers.
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
		target.removeAgent(uid, ch)
	case allocatorv1.WatchAgentsResponse_TYPE_SYNCED:
		x.swap(ch)
		ch.synced = true
		if timeout := m.GetHeartbeatTimeout(); timeout != nil {
			x.heartbeatTimeout = timeout.AsDuration()
		}
	case allocatorv1.WatchAgentsResponse_TYPE_UNSPECIFIED:
	}
	if x.staging != nil { // not visible yet
		return changes{}, nil
	}
	return ch, x.subscribers
}

// swap replaces the live content with the staged one. Everything in either may have changed.
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
		e = &entry{agent: a, reports: map[identity.Fence]*report{}}
		c.agents[uid] = e
	}
	statusChanged := e.agent.GetReady() != a.GetReady() || e.agent.GetReason() != a.GetReason()
	e.agent = a
	ch.pools[e.pool()] = true
	listed := make(map[identity.Fence]bool, len(reports))
	for _, r := range reports {
		listed[fenceOf(uid, r)] = true
		c.put(uid, e, r, now, ch)
	}
	for f, r := range e.reports {
		if !listed[f] {
			if r.terminatedAt.IsZero() {
				ch.sandbox(r.SandboxReport)
			}
			c.remove(e, f)
		} else if statusChanged {
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
	for f, r := range e.reports {
		if !r.terminatedAt.IsZero() && now.Sub(r.terminatedAt) > terminatedRetention {
			c.remove(e, f)
		}
	}
	ch.pools[e.pool()] = true
}

func (c *content) put(uid string, e *entry, r *agentv1.SandboxReport, now time.Time, ch changes) {
	f := fenceOf(uid, r)
	old := e.reports[f]
	if old != nil && proto.Equal(old.SandboxReport, r) {
		return
	}
	fresh := &report{SandboxReport: r}
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		fresh.terminatedAt = now
	}
	e.reports[f] = fresh
	if c.bySandbox[f.SandboxUID] == nil {
		c.bySandbox[f.SandboxUID] = map[string]bool{}
	}
	c.bySandbox[f.SandboxUID][uid] = true
	ch.sandbox(r)
}

// remove removes a report of an agent.
func (c *content) remove(e *entry, f identity.Fence) {
	delete(e.reports, f)
	for other := range e.reports {
		if other.SandboxUID == f.SandboxUID {
			return
		}
	}
	delete(c.bySandbox[f.SandboxUID], f.AgentUID)
	if len(c.bySandbox[f.SandboxUID]) == 0 {
		delete(c.bySandbox, f.SandboxUID)
	}
}

func (c *content) removeAgent(uid string, ch changes) {
	e := c.agents[uid]
	if e == nil {
		return
	}
	ch.pools[e.pool()] = true
	for f, r := range e.reports {
		ch.sandbox(r.SandboxReport)
		c.remove(e, f)
	}
	delete(c.agents, uid)
}
