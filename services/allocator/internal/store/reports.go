package store

import (
	"cmp"
	"slices"
	"strings"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// AgentJoined implements fleet.Listener.
func (s *Store) AgentJoined(agentUID, namespace string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.homes[agentUID] = namespace
}

// AgentSandboxes implements fleet.Listener.
func (s *Store) AgentSandboxes(agentUID string, reports []*agentv1.SandboxReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	listed := make(map[identity.Fence]bool, len(reports))
	for _, r := range reports {
		listed[identity.FenceOf(r.GetRecord().GetFence())] = true
	}
	for fk, key := range s.table.byAgent[agentUID] {
		if !listed[fk] {
			s.table.removeReport(agentUID, fk, key)
		}
	}
	for _, r := range reports {
		s.table.setReport(agentUID, r)
	}
}

// AgentChanges implements fleet.Listener.
func (s *Store) AgentChanges(agentUID string, reports []*agentv1.SandboxReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range reports {
		s.table.setReport(agentUID, r)
	}
}

// AgentGone implements fleet.Listener.
func (s *Store) AgentGone(agentUID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.table.homes, agentUID)
	for fk, key := range s.table.byAgent[agentUID] {
		s.table.removeReport(agentUID, fk, key)
	}
}

// SetContainerRemoved records that a container was certainly removed. Its agent reports that by another stream, perhaps after
// older reports: none of those makes the sandbox visible again.
func (s *Store) SetContainerRemoved(fence *agentv1.Fence) {
	fk := identity.FenceOf(fence)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.memory.setRemoved(fk)
	if key, ok := s.table.byAgent[fk.AgentUID][fk]; ok {
		s.table.change(key, func(*entry, snapshot) {})
	}
}

// ContainerRemoved reports whether a container is known to be removed.
func (s *Store) ContainerRemoved(key identity.Fence) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.memory.isRemoved(key)
}

// setReport sets the report of a container; a TERMINATED one removes it.
func (t *table) setReport(agentUID string, r *agentv1.SandboxReport) {
	key := Key{r.GetRecord().GetNamespace(), r.GetRecord().GetName()}
	fk := identity.FenceOf(r.GetRecord().GetFence())
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		t.removeReport(agentUID, fk, key)
		return
	}
	if t.byAgent[agentUID] == nil {
		t.byAgent[agentUID] = map[identity.Fence]Key{}
	}
	t.byAgent[agentUID][fk] = key
	t.change(key, func(e *entry, _ snapshot) { e.reports = e.reports.with(r) })
}

// removeReport removes the report of a container.
func (t *table) removeReport(agentUID string, fk identity.Fence, key Key) {
	if keys := t.byAgent[agentUID]; keys != nil {
		delete(keys, fk)
		if len(keys) == 0 {
			delete(t.byAgent, agentUID)
		}
	}
	if _, ok := t.entries[key]; ok {
		t.change(key, func(e *entry, _ snapshot) { e.reports = e.reports.without(fk) })
	}
}

// reports are the agents' reports on one name, one for each container: hardly ever more than one. They are immutable.
type reports []*agentv1.SandboxReport

func (rs reports) find(key identity.Fence) int {
	return slices.IndexFunc(rs, func(r *agentv1.SandboxReport) bool { return identity.FenceOf(r.GetRecord().GetFence()) == key })
}

// get returns the report of a container, or nil.
func (rs reports) get(key identity.Fence) *agentv1.SandboxReport {
	if i := rs.find(key); i >= 0 {
		return rs[i]
	}
	return nil
}

// with returns a copy with a report, which replaces an older one of its container.
func (rs reports) with(r *agentv1.SandboxReport) reports {
	return append(rs.without(identity.FenceOf(r.GetRecord().GetFence())), r)
}

// without returns a copy without the report of a container.
func (rs reports) without(key identity.Fence) reports {
	var rest reports
	for _, r := range rs {
		if identity.FenceOf(r.GetRecord().GetFence()) != key {
			rest = append(rest, r)
		}
	}
	return rest
}

// sorted returns the reports in the order of creation.
func (rs reports) sorted() []*agentv1.SandboxReport {
	return slices.SortedFunc(slices.Values(rs), func(a, b *agentv1.SandboxReport) int {
		return cmp.Or(a.GetRecord().GetCreateTime().AsTime().Compare(b.GetRecord().GetCreateTime().AsTime()),
			strings.Compare(a.GetContainerId(), b.GetContainerId()))
	})
}
