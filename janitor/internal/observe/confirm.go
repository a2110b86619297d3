package observe

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Confirm judges a thing anew by what containerd and the API server themselves say, in this order: who a container is must be
// known before the API server is asked for its Sandbox, so that a label which says that the Sandbox was written is older than
// the answer that it is not there. The error is errdefs.ErrNotFound for what is no more (it is forgotten), and any other one
// says that there is no evidence. It blocks for two questions to containerd and two to the API server at most.
func (b *Board) Confirm(ctx context.Context, key Key) (Finding, error) {
	b.mu.Lock()
	err := b.unready()
	b.mu.Unlock()
	if err != nil {
		return Finding{}, err
	}
	if key.Remnant {
		return b.confirmRemnant(ctx, key)
	}
	asked := b.clock.Now()
	c, err := b.config.Node.Get(ctx, key.ID)
	if err == nil && !c.Managed {
		err = fmt.Errorf("container %s is not ours: %w", key.ID, errdefs.ErrNotFound)
	}
	if errdefs.IsNotFound(err) {
		b.Gone(key)
	}
	if err != nil {
		return Finding{}, err
	}
	agent, err := b.liveAgent(ctx, c.Identity.AgentUID)
	if err != nil {
		return Finding{}, err
	}
	var live *resource
	if agent == verdict.AgentAlive && ofSandbox(c) && c.Identity.Persisted {
		if live, err = b.liveResource(ctx, c); err != nil {
			return Finding{}, err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock.Now()
	e := b.put(c, asked)
	r := b.resource(e, now)
	if live != nil {
		r = *live
		if live.State != verdict.ResourceAbsent {
			e.live, e.liveUntil = *live, now.Add(b.config.ScanInterval)
		}
	}
	if e.last.Traceparent, err = traceparent(c); err != nil {
		b.config.Log.Info("record of a container cannot be read", "container", c.ID, "err", err.Error())
	}
	b.conclude(e, agent, r, now)
	return e.last, nil
}

// Gone forgets a thing that is no more.
func (b *Board) Gone(key Key) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !key.Remnant {
		b.drop(key.ID)
	} else if b.remnants[key] != nil {
		delete(b.remnants, key)
		b.notify()
	}
}

// liveAgent asks the API server itself for an agent's Pod, and the node where that never had one.
func (b *Board) liveAgent(ctx context.Context, uid string) (verdict.Agent, error) {
	if uid == "" {
		return verdict.AgentUnknown, nil
	}
	pods, err := b.config.API.Pods(ctx)
	if err != nil {
		return 0, fmt.Errorf("asking for the Pods of this node: %w", err)
	}
	if pods[uid] {
		return verdict.AgentAlive, nil
	}
	running, err := b.config.Node.Runs(ctx, uid)
	if err != nil {
		return 0, fmt.Errorf("asking for the containers of Pod %s: %w", uid, err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.absentAgent(uid, running, b.clock.Now()), nil
}

// liveResource asks the API server itself for a container's Sandbox.
func (b *Board) liveResource(ctx context.Context, c Container) (*resource, error) {
	s, err := b.config.API.Sandbox(ctx, c.Identity.Namespace, c.Identity.Name)
	if err != nil {
		return nil, fmt.Errorf("asking for Sandbox %s/%s: %w", c.Identity.Namespace, c.Identity.Name, err)
	}
	if s == nil {
		return &resource{Resource: verdict.Resource{State: verdict.ResourceAbsent}}, nil
	}
	r := resourceOf(&s.ObjectMeta, &s.Status)
	return &r, nil
}

// traceparent is that of the call that created a container; empty for one without a record. A record that cannot be read is
// evidence of nothing: it only says nothing of the call.
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

// remnant is something that is left of a container without a record.
type remnant struct {
	last  Finding
	since time.Time
}

// ownedBy tells whether an agent owns it.
func (r *remnant) ownedBy(agentUID string) bool {
	for _, p := range r.last.Pieces {
		if p.Owner != "" && p.Owner == agentUID {
			return true
		}
	}
	return false
}

// judgeRemnant judges a remnant by what is known. mu is held.
func (b *Board) judgeRemnant(r *remnant, now time.Time) {
	b.concludeRemnant(r, func(uid string) verdict.Agent { return b.agent(uid, now) }, now)
}

// concludeRemnant judges the pieces of a remnant; the most careful verdict is that of all. mu is held.
func (b *Board) concludeRemnant(r *remnant, agent func(uid string) verdict.Agent, now time.Time) {
	f := r.last
	f.Time, f.Remnant = now, nil
	for _, p := range r.last.Pieces {
		o := &verdict.Remnant{ContainerID: f.Key.ID, Kind: f.Key.Kind, Since: now.Sub(r.since)}
		if o.Kind == verdict.Log {
			// A log without an owner is one whose removal was cut short.
			o.Deleted = !p.Deleted.IsZero() || p.Owner == ""
			if o.DeletedAge = now.Sub(p.Written); !p.Deleted.IsZero() {
				o.DeletedAge = now.Sub(p.Deleted)
			}
			if p.Owner != "" {
				o.Agent = agent(p.Owner)
			}
		}
		if v := verdict.DecideRemnant(*o, b.config.Policy); f.Remnant == nil || v.Action < f.Verdict.Action {
			f.Remnant, f.Verdict = o, v
		}
	}
	b.mark(&f, r.last.Verdict, r.last.Remnant == nil, now)
	r.last = f
}

// confirmRemnant makes sure that there is no container, and that the agents of logs are gone.
func (b *Board) confirmRemnant(ctx context.Context, key Key) (Finding, error) {
	_, err := b.config.Node.Get(ctx, key.ID)
	if err == nil {
		b.Gone(key)
		return Finding{}, fmt.Errorf("what is left of container %s, which is there: %w", key.ID, errdefs.ErrNotFound)
	}
	if !errdefs.IsNotFound(err) {
		return Finding{}, err
	}
	b.mu.Lock()
	r := b.remnants[key]
	b.mu.Unlock()
	if r == nil {
		return Finding{}, fmt.Errorf("what is left of container %s: %w", key.ID, errdefs.ErrNotFound)
	}
	agents := map[string]verdict.Agent{}
	if key.Kind == verdict.Log {
		b.mu.Lock()
		pieces := r.last.Pieces
		b.mu.Unlock()
		for _, p := range pieces {
			if p.Owner == "" || !p.Deleted.IsZero() {
				continue
			}
			if agents[p.Owner], err = b.liveAgent(ctx, p.Owner); err != nil {
				return Finding{}, err
			}
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.concludeRemnant(r, func(uid string) verdict.Agent { return agents[uid] }, b.clock.Now())
	return r.last, nil
}
