// Package pools is the memory of SandboxPools, fed by an informer. It does no I/O. All methods may be called concurrently;
// what it returns is shared and must not be changed.
package pools

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

type key struct{ namespace, name string }

// Pools is the memory.
type Pools struct {
	mu     sync.RWMutex
	pools  map[key]*v1alpha1.SandboxPool
	synced bool
}

// New returns a memory without pools.
func New() *Pools { return &Pools{pools: map[key]*v1alpha1.SandboxPool{}} }

// Set takes a pool from the informer.
func (p *Pools) Set(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pools[key{pool.Namespace, pool.Name}] = pool
}

// Remove tells that a pool is gone.
func (p *Pools) Remove(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := key{pool.Namespace, pool.Name}
	if there, ok := p.pools[k]; ok && there.UID == pool.UID {
		delete(p.pools, k)
	}
}

// SetSynced tells that everything that the API server holds has been seen once.
func (p *Pools) SetSynced() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.synced = true
}

// Synced tells whether everything that the API server holds has been seen once.
func (p *Pools) Synced() bool {
	p.mu.RLock()
	defer p.mu.RUnlock()
	return p.synced
}

// Pool returns one pool; false if there is none.
func (p *Pools) Pool(namespace, name string) (*v1alpha1.SandboxPool, bool) {
	p.mu.RLock()
	defer p.mu.RUnlock()
	pool, ok := p.pools[key{namespace, name}]
	return pool, ok
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
