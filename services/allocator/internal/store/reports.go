package store

import (
	"cmp"
	"slices"
	"strings"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
)

// AgentSandboxes implements fleet.Listener.
func (s *Store) AgentSandboxes(agentUID string, reports []*agentv1.SandboxReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	listed := make(map[fleet.Key]bool, len(reports))
	for _, r := range reports {
		listed[fleet.KeyOf(r.GetRecord().GetFence())] = true
	}
	for fk, key := range s.byAgent[agentUID] {
		if !listed[fk] {
			s.removeReport(agentUID, fk, key)
		}
	}
	for _, r := range reports {
		s.setReport(agentUID, r)
	}
}

// AgentChanges implements fleet.Listener.
func (s *Store) AgentChanges(agentUID string, reports []*agentv1.SandboxReport) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range reports {
		s.setReport(agentUID, r)
	}
}

// AgentGone implements fleet.Listener.
func (s *Store) AgentGone(agentUID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for fk, key := range s.byAgent[agentUID] {
		s.removeReport(agentUID, fk, key)
	}
}

func (s *Store) setReport(agentUID string, r *agentv1.SandboxReport) {
	key := Key{r.GetRecord().GetNamespace(), r.GetRecord().GetName()}
	fk := fleet.KeyOf(r.GetRecord().GetFence())
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		s.removeReport(agentUID, fk, key)
		return
	}
	e := s.entry(key)
	e.reports.set(r)
	if s.byAgent[agentUID] == nil {
		s.byAgent[agentUID] = map[fleet.Key]Key{}
	}
	s.byAgent[agentUID][fk] = key
	s.refresh(e)
}

func (s *Store) removeReport(agentUID string, fk fleet.Key, key Key) {
	if keys := s.byAgent[agentUID]; keys != nil {
		delete(keys, fk)
		if len(keys) == 0 {
			delete(s.byAgent, agentUID)
		}
	}
	e, ok := s.entries[key]
	if !ok {
		return
	}
	e.reports.remove(fk)
	s.refresh(e)
}

// reports are the agents' words on one name, one for each container: hardly ever more than one.
type reports []*agentv1.SandboxReport

func (rs reports) find(key fleet.Key) int {
	return slices.IndexFunc(rs, func(r *agentv1.SandboxReport) bool { return fleet.KeyOf(r.GetRecord().GetFence()) == key })
}

// get is nil if there is none.
func (rs reports) get(key fleet.Key) *agentv1.SandboxReport {
	if i := rs.find(key); i >= 0 {
		return rs[i]
	}
	return nil
}

func (rs *reports) set(r *agentv1.SandboxReport) {
	if i := rs.find(fleet.KeyOf(r.GetRecord().GetFence())); i >= 0 {
		(*rs)[i] = r
		return
	}
	*rs = append(*rs, r)
}

func (rs *reports) remove(key fleet.Key) {
	if i := rs.find(key); i >= 0 {
		*rs = slices.Delete(*rs, i, i+1)
	}
}

// sorted is in the order of their creation.
func (rs reports) sorted() []*agentv1.SandboxReport {
	return slices.SortedFunc(slices.Values(rs), func(a, b *agentv1.SandboxReport) int {
		return cmp.Or(a.GetRecord().GetCreateTime().AsTime().Compare(b.GetRecord().GetCreateTime().AsTime()),
			strings.Compare(a.GetContainerId(), b.GetContainerId()))
	})
}
