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
var callPolicy = backoff.Policy{Initial: 50 * time.Millisecond, Max: 5 * time.Second}

// call calls the agent until the container is certainly gone, the deletion is withdrawn, or ctx ends: then the next process
// finds the container reported, and continues.
func (m *Manager) call(ctx context.Context, d *Deletion) {
	fence := d.request.Fence
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandboxUID, fence.SandboxUID, obs.KeyAttempt, fence.Attempt, obs.KeyAgentUID, fence.AgentUID)
	delays := backoff.New(m.config.Clock, callPolicy)
	for {
		err := m.callOnce(ctx, d)
		if err == nil {
			m.containerRemoved(d)
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

// callOnce returns nil once the container is certainly gone from the agent.
func (m *Manager) callOnce(ctx context.Context, d *Deletion) error {
	fence := d.request.Fence
	if m.config.Agents.Gone(fence.AgentUID) {
		return nil
	}
	if !m.config.Leads() {
		return errNotLeading
	}
	client, ok := m.config.Agents.Client(fence.AgentUID)
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
