package sandbox

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// pools resolves the pool of a sandbox and what the sandbox inherits from it.
type pools struct {
	client client.Reader
	agents *agentAccess
}

// resolve writes the pool to the status: that of the spec, of the assigned agent, or the namespace's default pool. The default
// pool of a sandbox that is not assigned may still change.
func (p *pools) resolve(ctx context.Context, t *target) error {
	st := &t.sandbox.Status
	switch {
	case t.sandbox.Spec.PoolRef != "":
		st.Pool = t.sandbox.Spec.PoolRef
		return nil
	case t.deleting(), st.Pool != "" && (t.assignment != nil || t.state().Finished):
		return nil
	case t.assignment != nil:
		if agent, ok := p.agents.index.Agent(t.assignment.AgentUID); ok && agent.GetInfo().GetPool() != "" {
			st.Pool = agent.GetInfo().GetPool()
			return nil
		}
		if pool := t.sandbox.Labels[v1alpha1.LabelPool]; pool != "" { // the Registry does not have the agent yet
			st.Pool = pool
			return nil
		}
	}
	// Not a metadata-only informer: that of controller-runtime leaks a goroutine when it stops (watch.Filter).
	var namespace corev1.Namespace
	if err := p.client.Get(ctx, types.NamespacedName{Name: t.name.Namespace}, &namespace); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("reading namespace: %w", err)
	}
	st.Pool = v1alpha1.DefaultPoolOf(namespace.Annotations)
	return nil
}

// get reads the pool of a sandbox.
func (p *pools) get(ctx context.Context, t *target) (*v1alpha1.SandboxPool, error) {
	var pool v1alpha1.SandboxPool
	if err := p.client.Get(ctx, p.key(t), &pool); err != nil {
		return nil, fmt.Errorf("reading pool: %w", err)
	}
	return &pool, nil
}

func (p *pools) key(t *target) types.NamespacedName {
	return types.NamespacedName{Namespace: t.name.Namespace, Name: t.sandbox.Pool()}
}

// find returns the pool of a sandbox, or nil if it is not known.
func (p *pools) find(ctx context.Context, t *target) *v1alpha1.SandboxPool {
	pool, err := p.get(ctx, t)
	if err != nil {
		return nil
	}
	return pool
}
