package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const allocateTimeout = 5 * time.Second

// placer carries out lifecycle.Allocate.
type placer struct {
	allocator allocatorv1.AllocatorServiceClient
	explainer *explainer
	writer    *writer
	memory    *memory
	timing    Timing
	metrics   metrics
}

// allocate reserves capacity and writes the assignment, before an agent is asked for the container. If the process dies in
// between, the allocator gives the reservation up after a while; until then it returns the same one again.
func (p *placer) allocate(ctx context.Context, t *target) (progress, error) {
	if !readyForAttempt(t) {
		return progress{result: result{requeue: after(0)}}, nil
	}
	ctx, span := obs.Tracer().Start(withTrace(ctx, t), "sandbox.reserve", spanOf(t))
	defer span.End()
	s := t.sandbox
	if err := convert.CheckLimits(convert.LimitsToProto(s.Spec.Resources), p.explainer.pools.find(ctx, t)); err != nil {
		return p.unplaced(ctx, t, err), nil
	}
	call, cancel := context.WithTimeout(ctx, allocateTimeout)
	defer cancel()
	resp, err := p.allocator.Allocate(call, &allocatorv1.AllocateRequest{
		Namespace: s.Namespace, Name: s.Name, SandboxUid: s.EffectiveUID(), Attempt: s.Status.Attempt + 1,
		Pool: s.Pool(), Image: s.Spec.Image, Ports: s.Spec.ExposedPorts, ExcludeAgents: p.memory.excluded(t.name),
		Resources: convert.LimitsToProto(s.Spec.Resources),
	})
	if err != nil {
		return p.unplaced(ctx, t, rpc.FromStatus(err)), nil
	}
	a := resp.GetAssignment()
	next := &v1alpha1.Assignment{
		AgentPod: a.GetAgentPod(), AgentUID: a.GetFence().GetAgentUid(), NodeName: a.GetNodeName(), AgentAddress: a.GetAgentAddress(),
		SandboxUID: a.GetFence().GetSandboxUid(), Attempt: a.GetFence().GetAttempt(),
	}
	if next.SandboxUID != s.EffectiveUID() || next.Attempt != s.Status.Attempt+1 || next.AgentUID == "" {
		return progress{}, fmt.Errorf("reserving capacity: the allocator returned the fence %v", a.GetFence())
	}
	return p.assign(ctx, t, next)
}

// assign writes the assignment.
func (p *placer) assign(ctx context.Context, t *target, next *v1alpha1.Assignment) (progress, error) {
	s := t.sandbox
	s.SetAssignment(next)
	if s.Labels == nil {
		s.Labels = map[string]string{}
	}
	if len(validation.IsValidLabelValue(next.NodeName)) == 0 { // the name of a node may be longer than the value of a label
		s.Labels[v1alpha1.LabelNode] = next.NodeName
	}
	s.Labels[v1alpha1.LabelPool] = s.Pool()
	if err := p.writer.metadata(ctx, t); err != nil {
		s.SetAssignment(nil)
		if apierrors.IsConflict(err) {
			return progress{}, err // the allocator returns the same reservation again
		}
		return progress{}, fmt.Errorf("writing assignment: %w", err)
	}
	clearEnd(&s.Status)
	t.assignment = next
	recordAssignment(t, p.memory)
	return progress{done: true, result: result{cause: &cause{}}}, nil
}

// recordAssignment copies the assignment into the status. The finalizer of a sandbox that was not created on the fast path may
// have been written too late to hold its resource; then the container is removed by leftovers, which remembers it.
func recordAssignment(t *target, m *memory) {
	if t.assignment == nil {
		return
	}
	st := &t.sandbox.Status
	st.Attempt = max(st.Attempt, t.assignment.Attempt)
	st.AssignedPod, st.NodeName = t.assignment.AgentPod, t.assignment.NodeName
	if t.sandbox.Annotations[v1alpha1.AnnotationSandboxUID] == "" {
		a, grace := *t.assignment, t.gracePeriod()
		m.holds.update(t.name, func(h *hold) { *h = hold{a, grace} })
	}
}

// readyForAttempt reports whether a new attempt can begin with the status that the API server has. If that status still says
// that the sandbox runs, or that a reset is outstanding, it would be taken to be about the new attempt.
func readyForAttempt(t *target) bool {
	switch st := t.base.Status; st.Phase {
	case "":
		return true
	case v1alpha1.PhaseRunning, v1alpha1.PhaseFailed, v1alpha1.PhaseExpired:
		return false
	default:
		return st.AcceptedResetRevision.Equal(t.sandbox.Status.AcceptedResetRevision)
	}
}

// unplaced handles an error of the allocator.
func (p *placer) unplaced(ctx context.Context, t *target, err error) progress {
	why := p.explainer.unplaced(ctx, t, err)
	p.metrics.unplaced.WithLabelValues(why.reason).Inc()
	out := progress{result: result{cause: &why, unplaced: &why}}
	if errdefs.IsInvalidArgument(err) {
		out.done, out.next = true, lifecycle.AgentFailed
		return out
	}
	wait := p.timing.Requeue
	if d, ok := fault.RetryAfter(err); ok {
		wait = min(d, wait)
	}
	out.requeue = after(wait)
	return out
}
