package deletion

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

var (
	errUnreachable = errors.New("no connection to the agent")
	errNotLeading  = errors.New("another process may lead")
	errOver        = errors.New("the deletion is over")
)

// callPolicy is that of calls to an agent. A refusal because of a later leader is no certainty: the agent is asked again, if
// this process still leads.
var callPolicy = backoff.Policy{Initial: 50 * time.Millisecond, Max: 2 * time.Second}

// caller carries out the container half of one deletion: it has the agent delete the container, and drop its tombstone.
type caller struct {
	config   *Config
	deletion *Deletion
}

func callerOf(d *Deletion) caller { return caller{config: &d.manager.config, deletion: d} }

// run calls the agent until the container is certainly gone, the deletion is withdrawn, or ctx ends: then the next process
// finds the container reported, and continues.
func (c caller) run(ctx context.Context) {
	d, fence := c.deletion, c.deletion.request.Fence
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandboxUID, fence.SandboxUID, obs.KeyAttempt, fence.Attempt, obs.KeyAgentUID, fence.AgentUID)
	delays := backoff.New(c.config.Clock, callPolicy)
	for {
		err := c.once(ctx)
		if err == nil {
			d.manager.containerRemoved(d)
			return
		}
		again, over := d.failed(err)
		if over {
			return
		}
		if again {
			continue
		}
		log.V(2).Info("deleting container again", obs.KeyError, err.Error())
		if delays.Wait(ctx) != nil {
			return
		}
	}
}

// once makes one call. It returns nil once the container is certainly gone from the agent.
func (c caller) once(ctx context.Context) error {
	d, fence := c.deletion, c.deletion.request.Fence
	if c.config.Agents.Gone(fence.AgentUID) {
		return nil
	}
	if !c.config.Leads() {
		return errNotLeading
	}
	client, ok := c.config.Agents.Client(fence.AgentUID)
	if !ok {
		return errUnreachable
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	r, revision, ok := d.begin(cancel)
	if !ok {
		return errOver
	}
	ctx, span := obs.Tracer().Start(ctx, "delete container", trace.WithAttributes(
		attribute.String(obs.AttrSandboxUID, fence.SandboxUID), attribute.Int64(obs.AttrAttempt, fence.Attempt), attribute.String(obs.AttrAgentUID, fence.AgentUID)))
	defer span.End()
	stream, err := client.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{
		Fence: convert.FenceToProto(fence), GracePeriod: r.Grace, Tombstone: r.Tombstone,
	})
	if err != nil {
		return rpc.FromStatus(err)
	}
	for {
		answer, err := stream.Recv()
		switch {
		case err == nil:
			d.accept(r, revision)
			if answer.GetStage() == agentv1.DeleteStage_DELETE_STAGE_REMOVED {
				return d.finished(r)
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

// dropTombstone has the agent drop its tombstone; nil if there is none, or no agent.
func (c caller) dropTombstone(ctx context.Context) error {
	fence := c.deletion.request.Fence
	if c.config.Agents.Gone(fence.AgentUID) {
		return nil
	}
	client, ok := c.config.Agents.Client(fence.AgentUID)
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	_, err := client.ForgetTombstone(ctx, &agentv1.ForgetTombstoneRequest{Fence: convert.FenceToProto(fence)})
	if err = rpc.FromStatus(err); errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.FenceMismatch {
		return nil
	}
	return err
}
