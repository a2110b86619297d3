package observe

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Confirm judges a thing by the live answers of containerd and of the API server, in this order: containerd's label that the
// Sandbox was written must be older than the API server's answer that it does not exist. The error is errdefs.ErrNotFound if the
// thing no longer exists, which is recorded; any other error means that there is no evidence. It makes at most two requests to
// containerd and two to the API server.
func (s *NodeState) Confirm(ctx context.Context, key Key) (Finding, error) {
	s.mu.Lock()
	err := s.unready()
	s.mu.Unlock()
	if err != nil {
		return Finding{}, err
	}
	if key.Remnant {
		return s.confirmRemnant(ctx, key)
	}
	asked := s.clock.Now()
	c, err := s.config.Node.Get(ctx, key.ID)
	if err == nil && !c.Managed {
		err = fmt.Errorf("container %s is not managed: %w", key.ID, errdefs.ErrNotFound)
	}
	if errdefs.IsNotFound(err) {
		s.Gone(key)
	}
	if err != nil {
		return Finding{}, err
	}
	agent, err := s.liveAgent(ctx, c.Identity.AgentUID)
	if err != nil {
		return Finding{}, err
	}
	var live *resource
	if agent == verdict.AgentAlive && ofSandbox(c) && c.Identity.Persisted {
		if live, err = s.liveResource(ctx, c); err != nil {
			return Finding{}, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	e := s.put(c, asked)
	r := s.resource(e, now)
	if live != nil {
		r = *live
		if live.State != verdict.ResourceAbsent {
			e.live, e.liveUntil = *live, now.Add(s.config.ScanInterval)
		}
	}
	if e.last.Traceparent, err = traceparent(c); err != nil {
		s.config.Log.Info("record of a container is unreadable", obs.KeyContainer, c.ID, obs.KeyError, err.Error())
	}
	s.conclude(e, agent, r, now)
	return e.last, nil
}

// Gone records that a thing was removed.
func (s *NodeState) Gone(key Key) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !key.Remnant {
		s.drop(key.ID)
	} else if s.inventory.dropRemnant(key) {
		s.notify()
	}
}

// liveAgent asks the API server about an agent's Pod, and containerd if the API server never had it.
func (s *NodeState) liveAgent(ctx context.Context, uid string) (verdict.Agent, error) {
	if uid == "" {
		return verdict.AgentUnknown, nil
	}
	pods, err := s.config.API.Pods(ctx)
	if err != nil {
		return 0, fmt.Errorf("listing the Pods of this node: %w", err)
	}
	if pods[uid] {
		return verdict.AgentAlive, nil
	}
	running, err := s.config.Node.Runs(ctx, uid)
	if err != nil {
		return 0, fmt.Errorf("listing the containers of Pod %s: %w", uid, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.agents.absent(uid, running, s.clock.Now()), nil
}

// liveResource asks the API server for a container's Sandbox.
func (s *NodeState) liveResource(ctx context.Context, c Container) (*resource, error) {
	sandbox, err := s.config.API.Sandbox(ctx, c.Identity.Namespace, c.Identity.Name)
	if err != nil {
		return nil, fmt.Errorf("getting Sandbox %s/%s: %w", c.Identity.Namespace, c.Identity.Name, err)
	}
	if sandbox == nil {
		return &resource{Resource: verdict.Resource{State: verdict.ResourceAbsent}}, nil
	}
	r := resourceOf(&sandbox.ObjectMeta, &sandbox.Status)
	return &r, nil
}

// traceparent returns the trace context of the call that created a container; empty for a container without a record. A record that
// cannot be read is no evidence for anything else.
func traceparent(c Container) (string, error) {
	if c.Record == nil {
		return "", nil
	}
	record := &agentv1.SandboxRecord{}
	if err := c.Record.UnmarshalTo(record); err != nil {
		return "", err
	}
	return record.GetTraceparent(), nil
}

// confirmRemnant checks that the container does not exist, and that the agents are gone whose end the verdict depends on. The anchor of a
// shim is a container, and exists: that no container is in the shim is checked again by its removal.
func (s *NodeState) confirmRemnant(ctx context.Context, key Key) (Finding, error) {
	c, err := s.config.Node.Get(ctx, key.ID)
	if err == nil && key.Kind == verdict.Shim && !c.Managed {
		err = errdefs.ErrNotFound
	}
	if err == nil {
		s.Gone(key)
		return Finding{}, fmt.Errorf("remnant of container %s, which exists: %w", key.ID, errdefs.ErrNotFound)
	}
	if !errdefs.IsNotFound(err) {
		return Finding{}, err
	}
	s.mu.Lock()
	r := s.inventory.remnants[key]
	s.mu.Unlock()
	if r == nil {
		return Finding{}, fmt.Errorf("remnant of container %s: %w", key.ID, errdefs.ErrNotFound)
	}
	agents, err := s.liveOwners(ctx, r)
	if err != nil {
		return Finding{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.concludeRemnant(r, func(uid string) verdict.Agent { return agents[uid] }, s.clock.Now())
	return r.last, nil
}

// liveOwners asks the API server about the agents that own a remnant. That is not necessary for a log whose container was deleted,
// nor for anything else that has been without a container for long enough, except a shim.
func (s *NodeState) liveOwners(ctx context.Context, r *remnant) (map[string]verdict.Agent, error) {
	s.mu.Lock()
	key, pieces, age := r.last.Key, r.last.Pieces, s.clock.Now().Sub(r.since)
	s.mu.Unlock()
	agents := map[string]verdict.Agent{}
	if key.Kind != verdict.Log && key.Kind != verdict.Shim && age >= s.config.Policy.LeftoverGrace {
		return agents, nil
	}
	for _, p := range pieces {
		if p.Owner == "" || !p.Deleted.IsZero() {
			continue
		}
		state, err := s.liveAgent(ctx, p.Owner)
		if err != nil {
			return nil, err
		}
		agents[p.Owner] = state
	}
	return agents, nil
}
