package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	allocateTimeout = 5 * time.Second
	// createTimeout bounds a create with the download of a large image in it.
	createTimeout = 15 * time.Minute
)

// allocate reserves a place and makes the assignment durable, before any agent is asked for anything. A process that
// dies in between has reserved a place that the allocator gives up by itself; the next one is given the same place.
func (p *pass) allocate(ctx context.Context) (bool, error) {
	s := p.sandbox
	if !p.restarts() {
		p.after(time.Millisecond)
		return false, nil
	}
	ctx, span := obs.Tracer().Start(p.linked(ctx), "sandbox.reserve")
	defer span.End()
	call, cancel := context.WithTimeout(ctx, allocateTimeout)
	defer cancel()
	resp, err := p.Allocator.Allocate(call, &allocatorv1.AllocateRequest{
		Namespace: s.Namespace, Name: s.Name, SandboxUid: s.EffectiveUID(), Attempt: s.Status.Attempt + 1,
		Pool: s.Spec.PoolRef, Image: s.Spec.Image, Ports: s.Spec.ExposedPorts, ExcludeAgents: p.ops.exclusions(p.name),
	})
	if err != nil {
		return p.notPlaced(ctx, rpc.FromStatus(err)), nil
	}
	a := resp.GetAssignment()
	next := &v1alpha1.Assignment{
		AgentPod: a.GetAgentPod(), AgentUID: a.GetFence().GetAgentUid(), NodeName: a.GetNodeName(), AgentAddress: a.GetAgentAddress(),
		SandboxUID: a.GetFence().GetSandboxUid(), Attempt: a.GetFence().GetAttempt(),
	}
	if next.SandboxUID != s.EffectiveUID() || next.Attempt != s.Status.Attempt+1 || next.AgentUID == "" {
		return false, fmt.Errorf("reserving a place: the allocator answered with the fence %v", a.GetFence())
	}
	s.SetAssignment(next)
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	if len(validation.IsValidLabelValue(next.NodeName)) == 0 { // a node's name may be longer than a label's value
		s.Labels[v1alpha1.LabelNode] = next.NodeName
	}
	s.Labels[v1alpha1.LabelPool] = s.Spec.PoolRef
	if err := p.writeMetadata(ctx); err != nil {
		s.SetAssignment(nil)
		if apierrors.IsConflict(err) {
			return false, err // the place is found again, or given up with time
		}
		return false, fmt.Errorf("writing assignment: %w", err)
	}
	p.forgetEnd()
	p.assignment, p.unplaced = next, ""
	p.explain("", "")
	p.begin()
	return true, nil
}

// restarts tells that the status as it is written lets a new attempt begin. An assignment that is newer than a status which
// claims that the sandbox runs, or that a reset is still to be done, would be taken for that one's.
func (p *pass) restarts() bool {
	switch st := p.base.Status; st.Phase {
	case "":
		return true
	case v1alpha1.PhaseRunning, v1alpha1.PhaseFailed, v1alpha1.PhaseExpired:
		return false
	default:
		return st.AcceptedResetRevision.Equal(p.sandbox.Status.AcceptedResetRevision)
	}
}

// notPlaced tells what an allocator's refusal means; true if there is something to go on with at once.
func (p *pass) notPlaced(ctx context.Context, err error) bool {
	var message string
	p.unplaced, message = p.whyUnplaced(ctx, err)
	p.metrics.refused.WithLabelValues(p.unplaced).Inc()
	p.explain(p.unplaced, message)
	if errdefs.IsInvalidArgument(err) {
		p.refused = true
		return true
	}
	wait := p.Timing.Requeue
	if d, ok := fault.RetryAfter(err); ok {
		wait = min(d, wait)
	}
	p.after(wait)
	return false
}

// create has the assigned agent asked for the container, beside this pass. The agent is the judge of repetition: it
// answers a fence that it knows with what it has.
func (p *pass) create(ctx context.Context) {
	p.after(p.Timing.Requeue)
	p.explainCreate(outcome{})
	fence, address := p.fence(), p.addressOf(p.fence())
	record := p.recordOf(fence, p.poolDefaults(ctx))
	calls, agents, now := p.metrics.calls, p.Agents, p.Clock.Now
	p.ops.start(p.linked(ctx), p.name, p.key(opCreate), func(ctx context.Context, heard func(string)) (*agentv1.SandboxReport, error) {
		ctx, cancel := context.WithTimeout(ctx, createTimeout)
		defer cancel()
		ctx, span := obs.Tracer().Start(ctx, "sandbox.create")
		defer span.End()
		if record.GetTraceparent() == "" {
			record.Traceparent = obs.Traceparent(ctx)
		}
		started := now()
		report, err := createOn(ctx, agents, address, record, heard)
		calls.WithLabelValues(string(opCreate), result(err)).Observe(now().Sub(started).Seconds())
		return report, err
	})
}

func createOn(ctx context.Context, agents Agents, address string, record *agentv1.SandboxRecord, heard func(string)) (*agentv1.SandboxReport, error) {
	c, err := agents.Client(address)
	if err != nil {
		return nil, err
	}
	stream, err := c.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record, Persisted: true})
	if err != nil {
		return nil, rpc.FromStatus(err)
	}
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil, fmt.Errorf("creating %s-%d: %w", record.GetFence().GetSandboxUid(), record.GetFence().GetAttempt(), io.ErrUnexpectedEOF)
		case err != nil:
			return nil, rpc.FromStatus(err)
		case m.GetStage() == agentv1.CreateStage_CREATE_STAGE_STARTED && m.GetReport() != nil:
			return m.GetReport(), nil
		default:
			heard(m.GetStage().String())
		}
	}
}

func (p *pass) recordOf(fence *agentv1.Fence, defaults *sandboxv1.ResourceLimits) *agentv1.SandboxRecord {
	s := p.sandbox
	spec := convert.SpecToProto(&s.Spec)
	created := s.CreationTimestamp.Time
	if t, err := time.Parse(time.RFC3339Nano, s.Annotations[v1alpha1.AnnotationCreateTime]); err == nil {
		created = t
	}
	return &agentv1.SandboxRecord{
		Fence: fence, Namespace: s.Namespace, Name: s.Name, Labels: maps.Clone(s.Labels), Spec: spec,
		Limits:    convert.Effective(spec.GetResources(), defaults),
		RequestId: s.Annotations[v1alpha1.AnnotationRequestID], Traceparent: s.Annotations[v1alpha1.AnnotationTraceparent],
		CreateTime: timestamppb.New(created), ConsistencyMode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG,
	}
}

// poolDefaults are the limits of sandboxes that ask for none. A pool that is gone has none to give.
func (p *pass) poolDefaults(ctx context.Context) *sandboxv1.ResourceLimits {
	var pool v1alpha1.SandboxPool
	key := types.NamespacedName{Namespace: p.name.Namespace, Name: p.sandbox.Spec.PoolRef}
	if err := p.Client.Get(ctx, key, &pool); err != nil {
		return nil
	}
	return convert.LimitsToProto(pool.Spec.SandboxResources)
}

// linked puts what follows into the trace of the call that made the sandbox, unless it is in a trace already.
func (p *pass) linked(ctx context.Context) context.Context {
	if trace.SpanContextFromContext(ctx).IsValid() {
		return ctx
	}
	return obs.WithTraceparent(ctx, p.sandbox.Annotations[v1alpha1.AnnotationTraceparent])
}
