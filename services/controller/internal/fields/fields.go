// Package fields defines the field indexes of the controller's cache. It has no state; Register is called once, before the
// cache starts.
package fields

import (
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// The names of the indexes of Sandboxes, for client.MatchingFields.
const (
	// Agent is the uid of the agent Pod that a Sandbox is assigned to.
	Agent = "assignment.agentUID"
	// Pool is the name of a Sandbox's pool; see v1alpha1.Sandbox.Pool.
	Pool = "pool"
)

// Register adds the indexes to a cache.
func Register(ctx context.Context, indexer client.FieldIndexer) error {
	for name, extract := range map[string]client.IndexerFunc{Agent: AgentOf, Pool: PoolOf} {
		if err := indexer.IndexField(ctx, &v1alpha1.Sandbox{}, name, extract); err != nil {
			return fmt.Errorf("indexing sandboxes by %s: %w", name, err)
		}
	}
	return nil
}

// AgentOf extracts the values of the index Agent. A Sandbox that is not assigned, or whose assignment cannot be decoded, has
// none.
func AgentOf(o client.Object) []string {
	s, ok := o.(*v1alpha1.Sandbox)
	if !ok {
		return nil
	}
	if a, err := s.Assignment(); err == nil && a != nil {
		return []string{a.AgentUID}
	}
	return nil
}

// PoolOf extracts the values of the index Pool. A Sandbox whose pool is not resolved yet has none.
func PoolOf(o client.Object) []string {
	if s, ok := o.(*v1alpha1.Sandbox); ok && s.Pool() != "" {
		return []string{s.Pool()}
	}
	return nil
}
