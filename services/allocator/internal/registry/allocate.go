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

// retryCapacity is when a caller that met no capacity should try again: a pool needs about that long to notice.
const retryCapacity = time.Second

// Request asks for a place.
type Request struct {
	// Fence names the container that will be created; its AgentUID is ignored, for Allocate chooses the agent.
	Fence identity.Fence
	Pool  Pool
	// Image is a normalised reference (docker.io/library/busybox:latest).
	Image string
	Ports []int32
	// Exclude holds uids of agents that must not be chosen. A reservation that the key has on one of them is given up.
	Exclude []string
}

// Allocate reserves a place on the best agent and returns the agent's uid. It is atomic. The same key is answered with the
// same agent while the place is taken, unless that agent is excluded. Of agents that are equally good any may be chosen, but
// always the same after the same history. Errors are errdefs.ErrResourceExhausted: NoCapacity when no ready agent has room
// (retry later), PortConflict, with the metadata `port`, when those with room have a port taken. Success allocates nothing
// beyond the growth of tables.
func (r *Registry) Allocate(now time.Time, req Request) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	key := attempt(req.Fence)
	first := r.byKey.first(key)
	if first != nil && first.agent.pool.name == req.Pool {
		if a := first.agent; !slices.Contains(req.Exclude, a.uid) {
			if first.reserved {
				r.reserve(now, first)
			}
			return a.uid, nil
		}
		r.release(first)
		first = r.byKey.first(key)
	}
	pool := r.pools[req.Pool]
	if pool == nil {
		return "", refusal(&req, 0, placement.Verdict{})
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
	p := first.on(a)
	switch {
	case p == nil:
		p = r.take(a, key, req.Ports, first, true)
	case p != first: // the agent reports it already
		r.unchain(p)
		r.lead(p, first)
	}
	r.reserve(now, p)
	a.refresh()
	return a.uid, nil
}

// hide keeps agents from being chosen, and returns how many of them might have been.
func (r *Registry) hide(pool *pool, uids []string) int {
	hidden := 0
	for _, uid := range uids {
		if a := r.agents[uid]; a != nil && a.pool == pool && pool.index.Withdraw(a.id) {
			hidden++
		}
	}
	return hidden
}

// show undoes hide.
func (r *Registry) show(pool *pool, uids []string) {
	for _, uid := range uids {
		if a := r.agents[uid]; a != nil && a.pool == pool {
			a.refresh()
		}
	}
}

// verdict tells why no agent was chosen, as placement.Choose would. What is offered still has a port taken.
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
			"port %s is taken on every agent of pool %s that has room", port, pool).With("port", port)
	case agents == 0:
		err = fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "pool %s has no agents", pool)
	default:
		err = fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity,
			"no agent of pool %s has room: %d full, %d not ready, %d passed over", pool, v.Full, v.NotReady, v.Excluded)
	}
	return err.With("pool", req.Pool.Name).RetryIn(retryCapacity)
}

// Release gives up the reservation of a container on its agent; an empty AgentUID means wherever it is. A sandbox that its agent
// reports keeps its place until the agent says that it is gone. What is not reserved is released already.
func (r *Registry) Release(now time.Time, fence identity.Fence) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	p := r.byKey.first(attempt(fence))
	for fence.AgentUID != "" && p != nil && p.agent.uid != fence.AgentUID {
		p = p.twin
	}
	if p != nil {
		r.release(p)
	}
}
