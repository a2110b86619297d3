package registry

import (
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

// retryCapacity is the retry hint of a refusal for lack of capacity: a pool needs about that long to react.
const retryCapacity = time.Second

// Request asks for one unit of capacity.
type Request struct {
	// Fence names the container that will be created. Its AgentUID is ignored: Allocate chooses the agent.
	Fence identity.Fence
	Pool  Pool
	// Image is a normalized reference (docker.io/library/busybox:latest).
	Image string
	Ports []int32
	// Demand counts against the quotas of the namespace. New says that the sandbox counts as one from now on, until EndCreate;
	// otherwise Shown alone counts it.
	Demand Demand
	New    bool
	// Exclude holds uids of agents that must not be chosen. An existing reservation on one of them is released.
	Exclude []string
}

// Allocate reserves capacity on the best agent and returns the agent's uid. It is atomic. A repeated call for one attempt
// returns the same agent while the allocation exists, unless that agent is excluded. Among equally good agents the choice is
// arbitrary, but the same after the same history. Errors are errdefs.ErrResourceExhausted: NoCapacity when no ready agent has
// free capacity (retry later); PortConflict, with the metadata `port`, when those with free capacity have a port taken;
// QuotaExceeded, with the metadata `quota`, `resource`, `requested`, `used` and `allowed`, when the namespace has a quota that the
// sandbox would exceed. A successful call allocates no memory beyond the growth of tables.
func (r *Registry) Allocate(now time.Time, req Request) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	key := attemptOf(req.Fence)
	first := r.attempts.first(key)
	if first != nil && first.agent.pool.name == req.Pool {
		if a := first.agent; !slices.Contains(req.Exclude, a.uid) {
			if first.reserved {
				r.reserve(now, first)
			}
			return a.uid, nil
		}
		r.release(first)
		first = r.attempts.first(key)
	}
	pool := r.pools[req.Pool]
	if pool == nil {
		return "", refusal(&req, 0, placement.Verdict{})
	}
	_, counted := r.creating[req.Fence.SandboxUID]
	isNew := req.New && !counted
	if err := pool.space.admit(req.Demand, isNew); err != nil {
		return "", err
	}
	hidden := r.hide(pool, req.Exclude)
	id, ok := pool.index.Find(req.Image, req.Ports)
	var v placement.Verdict
	if !ok {
		v = pool.verdict(&req, hidden)
	}
	if hidden > 0 {
		r.show(pool, req.Exclude)
	}
	if !ok {
		return "", refusal(&req, pool.index.Len(), v)
	}
	a := pool.agents[id]
	l := first.on(a)
	switch {
	case l == nil:
		l = r.take(a, hold{key, req.Ports, req.Demand}, first, true)
	case l != first: // the agent reports it already
		r.unlink(l)
		r.linkFirst(l, first)
	}
	if isNew {
		r.creating[req.Fence.SandboxUID] = pool.space
		pool.space.used[Sandboxes]++
	}
	r.reserve(now, l)
	a.refresh()
	return a.uid, nil
}

// hide keeps agents from being chosen until show, and returns how many of them could have been.
func (r *Registry) hide(pool *pool, uids []string) int {
	hidden := 0
	for _, uid := range uids {
		if a := r.agents[uid]; a != nil && a.pool == pool && pool.index.Withdraw(a.id) {
			hidden++
		}
	}
	return hidden
}

func (r *Registry) show(pool *pool, uids []string) {
	for _, uid := range uids {
		if a := r.agents[uid]; a != nil && a.pool == pool {
			a.refresh()
		}
	}
}

// verdict says why no agent was chosen, as placement.Choose would. Every agent that is still offered has a port taken.
func (p *pool) verdict(req *Request, hidden int) placement.Verdict {
	offered := p.index.Offered()
	v := placement.Verdict{
		NotReady: p.index.Len() - p.full - offered - hidden,
		Full:     p.full, Excluded: hidden, Conflicting: offered,
	}
	if offered > 0 {
		v.Port = p.index.Crowded(req.Ports)
	}
	return v
}

func refusal(req *Request, agents int, v placement.Verdict) error {
	pool := req.Pool.Namespace + "/" + req.Pool.Name
	var err *fault.Error
	switch {
	case v.Conflicting > 0:
		port := strconv.Itoa(int(v.Port))
		err = fault.New(errdefs.ErrResourceExhausted, fault.PortConflict,
			"port %s is taken on every agent of pool %s that has free capacity", port, pool).With("port", port)
	case agents == 0:
		err = fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "pool %s has no agents", pool)
	default:
		err = fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity,
			"no agent of pool %s has free capacity: %d full, %d not ready, %d excluded", pool, v.Full, v.NotReady, v.Excluded)
	}
	return err.With("pool", req.Pool.Name).RetryIn(retryCapacity)
}

// Release cancels the reservation of a container on its agent; an empty AgentUID means on whichever agent it is. A sandbox
// that its agent reports keeps its capacity until the agent reports its end. Release is idempotent.
func (r *Registry) Release(now time.Time, fence identity.Fence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	l := r.attempts.first(attemptOf(fence))
	for fence.AgentUID != "" && l != nil && l.agent.uid != fence.AgentUID {
		l = l.next
	}
	if l != nil {
		r.release(l)
	}
}
