// Package reap drives deletions on agents to certainty: it repeats each until the agent says that the container is gone,
// or the agent's Pod itself is gone (its containers are then the janitor's). A refusal because of a later leader is no
// certainty: it is asked again, if this process still leads. All methods may be called concurrently.
package reap

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// Agents finds agents.
type Agents interface {
	// Client returns the connection to an agent; false if there is none (now).
	Client(uid string) (agentv1.AgentServiceClient, bool)
	// Gone tells whether it is certain that the agent's Pod is gone.
	Gone(uid string) bool
}

// Config is what a Reaper needs.
type Config struct {
	Agents Agents
	// Leads tells whether this process leads: another's decision is not forestalled.
	Leads func() bool
	Tasks *tasks.Set
	Clock clock.Clock
	// Removed is called, once for each drive, when the container is certainly gone, and before the drive ends: at no moment
	// is a container neither driven nor known to be gone.
	Removed func(fence *agentv1.Fence)
}

// Reaper deletes containers on agents.
type Reaper struct {
	config Config

	mu     sync.Mutex
	drives map[identity.Fence]*Drive
}

// New returns a reaper with nothing to do.
func New(cfg Config) *Reaper { return &Reaper{config: cfg, drives: map[identity.Fence]*Drive{}} }

// Drive has a container deleted in the background. Driving what is driven already joins it: a tombstone, or a grace period,
// that the first did not have is sent after it.
func (r *Reaper) Drive(o Order) *Drive {
	key := identity.FenceOf(o.Fence)
	r.mu.Lock()
	defer r.mu.Unlock()
	if d, ok := r.drives[key]; ok && !d.withdrawn {
		d.join(o)
		return d
	}
	d := &Drive{reaper: r, key: key, order: o, accepted: make(chan struct{}), done: make(chan struct{})}
	r.drives[key] = d
	r.config.Tasks.Go(func(ctx context.Context) { r.run(ctx, d) })
	return d
}

// Driving tells whether a deletion of the container is under way.
func (r *Reaper) Driving(key identity.Fence) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.drives[key]
	return ok
}

func (r *Reaper) run(ctx context.Context, d *Drive) {
	log := logr.FromContextOrDiscard(ctx).WithValues("sandboxUID", d.key.SandboxUID, "attempt", d.key.Attempt, "agentUID", d.key.AgentUID)
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 5*time.Second
	for {
		err := r.attempt(ctx, d)
		if err == nil {
			break
		}
		again, withdrawn := d.failed(err)
		if withdrawn {
			return
		}
		if again {
			continue
		}
		log.V(2).Info("deleting container again", "err", err.Error())
		timer := r.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done(): // the next process finds the container reported, and goes on
			timer.Stop()
			return
		case <-timer.C():
		}
	}
	if !d.settle() {
		return
	}
	r.config.Removed(convert.FenceToProto(d.key))
	d.end()
}

var (
	errUnreachable = errors.New("no connection to the agent")
	errNotLeading  = errors.New("another process may lead")
	errWithdrawn   = errors.New("the deletion was withdrawn")
)

// attempt returns nil once the container is certainly gone from the agent.
func (r *Reaper) attempt(ctx context.Context, d *Drive) error {
	if r.config.Agents.Gone(d.key.AgentUID) {
		return nil
	}
	if !r.config.Leads() {
		return errNotLeading
	}
	client, ok := r.config.Agents.Client(d.key.AgentUID)
	if !ok {
		return errUnreachable
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	order, ok := d.begin(cancel)
	if !ok {
		return errWithdrawn
	}
	stream, err := client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{
		Fence: convert.FenceToProto(d.key), GracePeriod: order.Grace, Tombstone: order.Tombstone,
	})
	if err != nil {
		return rpc.FromStatus(err)
	}
	for {
		m, err := stream.Recv()
		switch {
		case err == nil:
			d.accept(order)
			if m.GetStage() == agentv1.DeleteStage_DELETE_STAGE_REMOVED {
				return d.complete(order)
			}
		case errors.Is(err, io.EOF):
			return errors.New("the agent's stream ended before the container was removed")
		default:
			err = rpc.FromStatus(err)
			// Another fence is in force there: this one's container is not, and cannot come back.
			if fault.ReasonOf(err) == fault.FenceMismatch || errdefs.IsNotFound(err) {
				return nil
			}
			return err
		}
	}
}
