package store

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// AgentTombstones implements fleet.Listener. A sandbox with a tombstone is being deleted while it is visible, and gone after
// that: neither a delayed custom resource nor a repeated create makes it visible again, whichever replica leads.
func (s *Store) AgentTombstones(added, removed []*agentv1.Tombstone) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range added {
		s.rememberTombstone(t)
		s.addTombstone(t)
	}
	for _, t := range removed {
		s.removeTombstone(t)
	}
}

func (s *Store) addTombstone(t *agentv1.Tombstone) {
	key, uid := Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()
	if s.tombstones[uid] == nil {
		s.tombstones[uid] = map[identity.Fence]*agentv1.Tombstone{}
	}
	s.tombstones[uid][identity.FenceOf(t.GetFence())] = t
	if _, gone := s.gone[uid]; gone {
		return
	}
	if s.shows(key, uid) {
		s.markDeleting(key, uid)
		return
	}
	s.markGone(uid, snapshot{})
	if t.GetRequestId() != "" {
		s.answered[requestKey{key.Namespace, t.GetRequestId()}] = s.clock.Now()
	}
}

// removeTombstone removes a tombstone that an agent has dropped: the custom resource is deleted or being deleted.
func (s *Store) removeTombstone(t *agentv1.Tombstone) {
	key, uid := Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()
	delete(s.tombstones[uid], identity.FenceOf(t.GetFence()))
	if len(s.tombstones[uid]) > 0 {
		return
	}
	delete(s.tombstones, uid)
	if s.shows(key, uid) {
		return // it is visible until its custom resource is removed
	}
	s.markGone(uid, snapshot{})
}
