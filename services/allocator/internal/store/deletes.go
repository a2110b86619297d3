package store

import (
	"time"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Bounds of the memory of delete calls.
const (
	deletesTTL   = time.Hour
	deletesLimit = 10000
)

// Deleted is a sandbox that a delete call deleted.
type Deleted struct {
	Key Key
	UID string
}

// DeletedBy returns the sandbox whose deletion a delete call of that request_id made durable; false if none is known. Every
// replica knows it: from the custom resource, or from the agent's tombstone, for an hour after it saw them last.
func (s *Store) DeletedBy(namespace, requestID string) (Deleted, bool) {
	d, ok := s.deletes.Get(requestKey{namespace, requestID})
	if !ok {
		return Deleted{}, false
	}
	return d.(Deleted), true
}

// rememberDelete notes the delete call of a custom resource that is being deleted.
func (s *Store) rememberDelete(sb *v1alpha1.Sandbox) {
	if id := sb.Annotations[v1alpha1.AnnotationDeleteRequestID]; id != "" {
		s.deletes.Add(requestKey{sb.Namespace, id}, Deleted{Key{sb.Namespace, sb.Name}, sb.EffectiveUID()}, deletesTTL)
	}
}

// rememberTombstone notes the delete call of a tombstone.
func (s *Store) rememberTombstone(t *agentv1.Tombstone) {
	if id := t.GetDeleteRequestId(); id != "" {
		s.deletes.Add(requestKey{t.GetNamespace(), id}, Deleted{Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()}, deletesTTL)
	}
}
