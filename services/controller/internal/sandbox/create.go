package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// createTimeout bounds a create that pulls a large image.
const createTimeout = 15 * time.Minute

// creator carries out lifecycle.Create.
type creator struct {
	agents  *agentAccess
	pools   *pools
	calls   *calls
	memory  *memory
	timing  Timing
	metrics metrics
}

// create asks the assigned agent for the container, in the background. It may be repeated: an agent that has a container with
// the fence returns its report.
func (c *creator) create(ctx context.Context, t *target) progress {
	fence, address := t.fence(), c.agents.address(ctx, t.name.Namespace, t.fence(), t.assignment)
	record := recordOf(t, c.pools.find(ctx, t))
	c.calls.start(withTrace(ctx, t), t.name, fence, "", func(ctx context.Context, stage func(string)) (*agentv1.SandboxReport, error) {
		ctx, cancel := context.WithTimeout(ctx, createTimeout)
		defer cancel()
		ctx, span := obs.Tracer().Start(ctx, "sandbox.create", spanOfFence(fence))
		defer span.End()
		if record.GetTraceparent() == "" {
			record.Traceparent = obs.Traceparent(ctx)
		}
		done := c.metrics.timeCall("create", c.calls.clock)
		report, err := createOn(ctx, c.agents.calls, address, record, stage)
		done(err)
		return report, err
	})
	return progress{result: result{requeue: after(c.timing.Requeue), cause: createCause(t, outcome{}, c.timing, c.memory.lastError(t.name))}}
}

func createOn(ctx context.Context, agents Agents, address string, record *agentv1.SandboxRecord, stage func(string)) (*agentv1.SandboxReport, error) {
	client, err := agents.Client(address, record.GetFence().GetAgentUid())
	if err != nil {
		return nil, err
	}
	stream, err := client.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record, Persisted: true})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("creating %s: %w", identity.FenceOf(record.GetFence()), io.ErrUnexpectedEOF)
		case err != nil:
			return nil, rpc.FromStatus(err)
		case m.GetStage() == agentv1.CreateStage_CREATE_STAGE_STARTED && m.GetReport() != nil:
			return m.GetReport(), nil
		default:
			stage(m.GetStage().String())
		}
	}
}

// recordOf returns the record of the container to create. pool is nil if it is not known.
func recordOf(t *target, pool *v1alpha1.SandboxPool) *agentv1.SandboxRecord {
	s := t.sandbox
	spec := convert.SpecToProto(&s.Spec)
	spec.Pool = s.Pool()
	created := s.CreationTimestamp.Time
	if at, err := time.Parse(time.RFC3339Nano, s.Annotations[v1alpha1.AnnotationCreateTime]); err == nil {
		created = at
	}
	return &agentv1.SandboxRecord{
		Fence: convert.FenceToProto(t.fence()), Namespace: s.Namespace, Name: s.Name, Labels: maps.Clone(s.Labels), Spec: spec,
		Limits:    convert.Effective(spec.GetResources(), pool),
		RequestId: s.Annotations[v1alpha1.AnnotationRequestID], Traceparent: s.Annotations[v1alpha1.AnnotationTraceparent],
		CreateTime: timestamppb.New(created), ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG,
	}
}

// createCause explains the state of a create; the zero outcome is one that is being started. The error of the create before is
// shown until a create succeeds.
func createCause(t *target, call outcome, timing Timing, lastError *cause) *cause {
	late := call.running && t.now.Sub(call.started) >= timing.Requeue
	switch {
	case late && call.stage == "":
		return &cause{reasonNotAnswering, fmt.Sprintf("agent %s on node %s was asked at %s and has not answered; see the log of its Pod",
			t.assignment.AgentPod, t.assignment.NodeName, stamp(call.started))}
	case late && call.stage == agentv1.CreateStage_CREATE_STAGE_ADMITTED.String():
		return &cause{reasonPullingImage, fmt.Sprintf("agent %s has been pulling the image %s since %s", t.assignment.AgentPod, t.sandbox.Spec.Image, stamp(call.started))}
	case lastError != nil:
		return lastError
	default:
		return &cause{reasonCreating, ""}
	}
}
