package registry

import (
	"container/heap"
	"slices"
	"strconv"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

// retryCapacity is when a caller that met no capacity should try again: a pool needs about that long to notice.
const retryCapacity = time.Second

// Request asks for a place.
type Request struct {
	Key  Key
	Pool Pool
	// Image is a normalised reference (docker.io/library/busybox:latest).
	Image string
	Ports []int32
	// Exclude holds uids of agents that must not be chosen. A reservation that the key has on one of them is given up.
	Exclude []string
}

// Allocate reserves a place on the best agent and returns the agent's uid. It is atomic. The same key is answered with the
// same agent while the place is taken, unless that agent is excluded. Errors are errdefs.ErrResourceExhausted: NoCapacity
// when no ready agent has room (retry later), PortConflict, with the metadata `port`, when those with room have a port taken.
func (r *Registry) Allocate(now time.Time, req Request) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if p := r.byKey[req.Key]; p != nil && p.agent.pool == req.Pool {
		if !slices.Contains(req.Exclude, p.agent.UID) {
			if p.reserved {
				p.until = now.Add(r.reservation)
				heap.Fix(&r.expiry, p.index)
			}
			return p.agent.UID, nil
		}
		r.unreserve(p)
	}
	agents := r.pools[req.Pool]
	v := placement.Choose(agents, &placement.Request{
		Image: req.Image, Ports: req.Ports, Exclude: req.Exclude,
		HeardSince: now.Add(-r.heartbeat).UnixNano(),
	})
	if v.Chosen == nil {
		return "", refusal(req, len(agents), v)
	}
	r.reserve(now, r.agents[v.Chosen.UID], req)
	return v.Chosen.UID, nil
}

// reserve takes a place on an agent that has room. A place that the agent reports under the key already is used again.
func (r *Registry) reserve(now time.Time, a *agent, req Request) {
	p := a.places[req.Key]
	if p == nil {
		p = &place{key: req.Key, agent: a, ports: append([]int32(nil), req.Ports...)}
		a.places[req.Key] = p
		a.Allocated++
		a.take(p.ports)
	}
	r.byKey[req.Key] = p
	if !p.reserved {
		p.reserved, p.until = true, now.Add(r.reservation)
		heap.Push(&r.expiry, p)
	}
}

func refusal(req Request, agents int, v placement.Verdict) error {
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

// Release gives up the reservation of a key on an agent; an empty agent uid means wherever it is. A sandbox that its agent
// reports keeps its place until the agent says that it is gone. What is not reserved is released already.
func (r *Registry) Release(now time.Time, key Key, agentUID string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.enter(now)
	if agentUID == "" {
		if p := r.byKey[key]; p != nil {
			r.unreserve(p)
		}
		return
	}
	if a, ok := r.agents[agentUID]; ok {
		if p := a.places[key]; p != nil {
			r.unreserve(p)
		}
	}
}
