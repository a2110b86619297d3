package store

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// AgentTombstones implements fleet.Listener. What has a tombstone is being deleted as long as there is something of it to be
// seen, and gone else: no late custom resource and no repetition of its create brings it back, whoever leads.
func (s *Store) AgentTombstones(added, removed []*agentv1.Tombstone) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range added {
		s.rememberTombstone(t)
		s.entomb(t)
	}
	for _, t := range removed {
		s.forget(t)
	}
}

func (s *Store) entomb(t *agentv1.Tombstone) {
	key, uid := Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()
	if s.graves[uid] == nil {
		s.graves[uid] = map[identity.Fence]*agentv1.Tombstone{}
	}
	s.graves[uid][identity.FenceOf(t.GetFence())] = t
	if _, gone := s.gone[uid]; gone {
		return
	}
	if s.shows(key, uid) {
		s.markDeleting(key, uid)
		return
	}
	s.bury(uid, snapshot{})
	if t.GetRequestId() != "" {
		s.answered[requestKey{key.Namespace, t.GetRequestId()}] = s.clock.Now()
	}
}

// forget is told that an agent keeps a tombstone no more: the custom resource is gone or going.
func (s *Store) forget(t *agentv1.Tombstone) {
	key, uid := Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()
	delete(s.graves[uid], identity.FenceOf(t.GetFence()))
	if len(s.graves[uid]) > 0 {
		return
	}
	delete(s.graves, uid)
	if s.shows(key, uid) {
		return // its end is still to be seen
	}
	s.bury(uid, snapshot{})
}
