// Package pools owns the informer's view of SandboxPools, and of the default pool of each Namespace. It does no I/O. All
// methods may be called concurrently; the objects that it returns are shared and must not be changed.
package pools

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	corev1 "k8s.io/api/core/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

type key struct{ namespace, name string }

// Pools is the memory of pools.
type Pools struct {
	mu       sync.RWMutex
	pools    map[key]*v1alpha1.SandboxPool
	defaults map[string]string // by namespace; only those that are not v1alpha1.DefaultPool
	synced   bool
}

// New returns an empty memory.
func New() *Pools {
	return &Pools{pools: map[key]*v1alpha1.SandboxPool{}, defaults: map[string]string{}}
}

// Set adds or replaces a pool.
func (p *Pools) Set(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pools[key{pool.Namespace, pool.Name}] = pool
}

// Remove removes a pool, unless another one of its name has replaced it.
func (p *Pools) Remove(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := key{pool.Namespace, pool.Name}
	if current, ok := p.pools[k]; ok && current.UID == pool.UID {
		delete(p.pools, k)
	}
}

// SetNamespace records the default pool of a Namespace.
func (p *Pools) SetNamespace(namespace *corev1.Namespace) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if pool := v1alpha1.DefaultPoolOf(namespace.Annotations); pool != v1alpha1.DefaultPool {
		p.defaults[namespace.Name] = pool
		return
	}
	delete(p.defaults, namespace.Name)
}

// RemoveNamespace removes the default pool of a Namespace.
func (p *Pools) RemoveNamespace(namespace *corev1.Namespace) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.defaults, namespace.Name)
}

// SetSynced records that the informers have listed all objects.
func (p *Pools) SetSynced() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.synced = true
}

// Synced reports whether the informers have listed all objects.
func (p *Pools) Synced() bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.synced
}

// Pool returns one pool, and whether it is known.
func (p *Pools) Pool(namespace, name string) (*v1alpha1.SandboxPool, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pool, ok := p.pools[key{namespace, name}]
	return pool, ok
}

// Resolve returns name, or the namespace's default pool if name is empty. Before the informers have synced, the default of a
// namespace may be unknown: that is an ErrUnavailable, to be retried.
func (p *Pools) Resolve(namespace, name string) (string, error) {
	if name != "" {
		return name, nil
	}
	p.mu.RLock()
	defer p.mu.RUnlock()
	switch pool, ok := p.defaults[namespace]; {
	case ok:
		return pool, nil
	case p.synced:
		return v1alpha1.DefaultPool, nil
	}
	return "", fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the default pool of namespace %s is not known yet", namespace).
		RetryIn(time.Second)
}

// List returns the pools of a namespace, empty for all, in the order of namespace and name.
func (p *Pools) List(namespace string) []*v1alpha1.SandboxPool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	var out []*v1alpha1.SandboxPool
	for k, pool := range p.pools {
		if namespace == "" || namespace == k.namespace {
			out = append(out, pool)
		}
	}
	slices.SortFunc(out, func(a, b *v1alpha1.SandboxPool) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	return out
}
