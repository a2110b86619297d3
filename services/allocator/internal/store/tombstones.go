package store

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// AgentTombstones implements fleet.Listener. A sandbox with a tombstone is being deleted while it is visible, and gone after
// that: neither a delayed custom resource nor a repeated create makes it visible again, whichever replica leads.
func (s *Store) AgentTombstones(added, removed []*agentv1.Tombstone) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range added {
		s.deletes.addTombstone(t)
		s.addTombstone(t)
	}
	for _, t := range removed {
		s.removeTombstone(t)
	}
}

func (s *Store) addTombstone(t *agentv1.Tombstone) {
	i := incarnationOf(t)
	s.memory.addTombstone(t)
	if s.memory.isGone(i) {
		return
	}
	if s.table.shows(i) {
		s.table.change(i.key, func(*entry, snapshot) { s.memory.setDeleting(i) })
		return
	}
	s.memory.setGone(i, snapshot{})
	if t.GetRequestId() != "" {
		s.memory.setAnswered(requestKey{i.key.Namespace, t.GetRequestId()})
	}
}

// removeTombstone removes a tombstone that an agent has dropped: the custom resource is deleted or being deleted.
func (s *Store) removeTombstone(t *agentv1.Tombstone) {
	i := incarnationOf(t)
	if !s.memory.removeTombstone(t) || s.table.shows(i) {
		return // it is visible until its custom resource is removed
	}
	s.memory.setGone(i, snapshot{})
}
