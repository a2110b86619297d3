package store

import (
	"time"

	"k8s.io/apimachinery/pkg/util/cache"

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

// deletes remembers delete calls, within bounds.
type deletes struct{ cache *cache.LRUExpireCache } // requestKey -> Deleted

func newDeletes(c cache.Clock) deletes {
	return deletes{cache.NewLRUExpireCacheWithClock(deletesLimit, c)}
}

// DeletedBy returns the sandbox whose deletion a delete call of that request_id made durable; false if none is known. Every
// replica knows it: from the custom resource, or from the agent's tombstone, for an hour after it saw them last.
func (s *Store) DeletedBy(namespace, requestID string) (Deleted, bool) {
	d, ok := s.deletes.cache.Get(requestKey{namespace, requestID})
	if !ok {
		return Deleted{}, false
	}
	return d.(Deleted), true
}

// addResource notes the delete call of a custom resource that is being deleted.
func (d deletes) addResource(sb *v1alpha1.Sandbox) {
	if id := sb.Annotations[v1alpha1.AnnotationDeleteRequestID]; id != "" {
		d.cache.Add(requestKey{sb.Namespace, id}, Deleted{Key{sb.Namespace, sb.Name}, sb.EffectiveUID()}, deletesTTL)
	}
}

// addTombstone notes the delete call of a tombstone.
func (d deletes) addTombstone(t *agentv1.Tombstone) {
	if id := t.GetDeleteRequestId(); id != "" {
		d.cache.Add(requestKey{t.GetNamespace(), id}, Deleted{Key{t.GetNamespace(), t.GetName()}, t.GetFence().GetSandboxUid()}, deletesTTL)
	}
}
