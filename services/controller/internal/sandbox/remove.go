package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/durationpb"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

const (
	// releaseTimeout bounds a call that the allocator answers from memory.
	releaseTimeout = 2 * time.Second
	// maxGracePeriod bounds the grace period of a record, which this controller does not know.
	maxGracePeriod = time.Hour
)

// remover carries out lifecycle.Remove and lifecycle.Release, and removes containers of earlier attempts.
type remover struct {
	deleter   *deleter
	allocator allocatorv1.AllocatorServiceClient
	creates   *calls
	deletes   *calls
	writer    *writer
	timing    Timing
}

// remove asks the agent to remove the container, and waits until the agent has reported the removal or its Pod does not exist.
// Then it releases the assignment, in a deletion with the next event.
func (r *remover) remove(ctx context.Context, t *target, event lifecycle.Event) (progress, error) {
	fence := t.fence()
	if o, ok := r.creates.get(t.name, fence); ok && o.running {
		r.creates.drop(t.name, fence) // closing its stream cancels the create
	}
	waiting := progress{result: removalResult(t, event)}
	waiting.requeue = after(r.timing.DeletionPoll)
	call, ok := r.deletes.get(t.name, fence)
	if ok && !call.running && call.err == nil {
		return r.removed(ctx, t, waiting.result)
	}
	// A call to an agent whose Pod does not exist may take long to fail.
	gone, err := r.deleter.agents.podGone(ctx, t.name.Namespace, *t.assignment)
	if err != nil {
		return waiting, err
	}
	if gone {
		r.deletes.drop(t.name, fence)
		return r.removed(ctx, t, waiting.result)
	}
	if ok && waiting.removing {
		waiting.blocked = removalBlocked(t, call, r.timing)
	}
	sameGrace := call.args == formatGrace(t.gracePeriod())
	if ok && (call.running && sameGrace || !call.running && t.now.Sub(call.ended) < r.timing.DeletionPoll) {
		return waiting, nil
	}
	r.deletes.drop(t.name, fence)
	r.start(ctx, t, fence)
	return waiting, nil
}

// removed continues after the container was removed.
func (r *remover) removed(ctx context.Context, t *target, so result) (progress, error) {
	if t.deleting() {
		waiting, err := r.removeSuperseded(ctx, t)
		if err != nil || waiting != nil {
			return progress{result: so.merge(ptr.Deref(waiting, result{}))}, err
		}
		return progress{done: true, next: lifecycle.AgentTerminated, result: so}, nil
	}
	p, err := r.release(ctx, t)
	p.result = so.merge(p.result)
	return p, err
}

// start deletes a container in the background. The deletion continues on the agent if the call is canceled.
func (r *remover) start(ctx context.Context, t *target, fence identity.Fence) {
	address, grace := r.deleter.agents.address(ctx, t.name.Namespace, fence, t.assignment), t.gracePeriod()
	r.deletes.start(withTrace(ctx, t), t.name, fence, formatGrace(grace), func(ctx context.Context, stage func(string)) (*agentv1.SandboxReport, error) {
		return nil, r.deleter.delete(ctx, address, fence, grace, stage)
	})
}

// release gives up the reservation and clears the assignment. The number of the attempt, and a failure, have to be in the
// status first: they cannot be determined afterwards.
func (r *remover) release(ctx context.Context, t *target) (progress, error) {
	if t.assignment == nil { // deleted before it was assigned
		return progress{done: true}, nil
	}
	failing := t.sandbox.Status.Phase == v1alpha1.PhaseFailed && t.base.Status.Phase != v1alpha1.PhaseFailed
	if !t.deleting() && (t.base.Status.Attempt < t.assignment.Attempt || failing) {
		return progress{result: result{requeue: after(0)}}, nil
	}
	if err := releaseReservation(ctx, r.allocator, t.fence()); err != nil {
		// The Registry learns from the agent that the container is removed, so that a deletion need not wait.
		if !t.deleting() {
			return progress{}, fmt.Errorf("releasing reservation: %w", err)
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("reservation not released", obs.KeyError, err.Error())
	}
	r.creates.finish(t.name, t.fence())
	r.deletes.finish(t.name, t.fence())
	if t.deleting() {
		return progress{done: true}, nil
	}
	t.sandbox.SetAssignment(nil)
	delete(t.sandbox.Labels, v1alpha1.LabelNode)
	if err := r.writer.metadata(ctx, t); err != nil {
		return progress{}, fmt.Errorf("clearing assignment: %w", err)
	}
	t.clearAssignment()
	return progress{done: true}, nil
}

// removeStale removes containers of earlier attempts, for example of an agent that was lost and is back. The number of an
// attempt is never used again, so that a container is stale even if the resource in the cache is outdated.
func (r *remover) removeStale(ctx context.Context, t *target) result {
	current := t.sandbox.Status.Attempt + 1
	if t.assignment != nil {
		current = t.assignment.Attempt
	}
	var out result
	for _, report := range r.deleter.agents.index.Reports(t.sandbox.EffectiveUID()) {
		fence := identity.FenceOf(report.GetRecord().GetFence())
		// Another sandbox's container may have the uid that a user has written into this one's annotations.
		if !named(report, t.name) || fence.Attempt >= current || report.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATING {
			continue
		}
		if o, ok := r.deletes.get(t.name, fence); ok && !o.running {
			r.deletes.drop(t.name, fence)
			out.requeue = after(r.timing.DeletionPoll)
			continue
		}
		r.start(ctx, t, fence)
	}
	return out
}

func releaseReservation(ctx context.Context, allocator allocatorv1.AllocatorServiceClient, fence identity.Fence) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	_, err := allocator.Release(ctx, &allocatorv1.ReleaseRequest{Fence: convert.FenceToProto(fence)})
	if err := rpc.FromStatus(err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

// deleter deletes containers on agents.
type deleter struct {
	agents  *agentAccess
	calls   *calls
	metrics metrics
}

// delete deletes a container, and waits until the agent has reported its removal, for the grace period and a minute. A nil
// grace period is that of the container's record.
func (d *deleter) delete(ctx context.Context, address string, fence identity.Fence, grace *time.Duration, stage func(string)) error {
	timeout := maxGracePeriod
	if grace != nil {
		timeout = *grace
	}
	ctx, cancel := context.WithTimeout(ctx, timeout+time.Minute)
	defer cancel()
	ctx, span := obs.Tracer().Start(ctx, "sandbox.delete", spanOfFence(fence))
	defer span.End()
	done := d.metrics.timeCall("delete", d.calls.clock)
	err := deleteOn(ctx, d.agents.calls, address, fence, grace, stage)
	done(err)
	return err
}

func deleteOn(ctx context.Context, agents Agents, address string, fence identity.Fence, grace *time.Duration, stage func(string)) error {
	client, err := agents.Client(address, fence.AgentUID)
	if err != nil {
		return err
	}
	req := &agentv1.DeleteSandboxRequest{Fence: convert.FenceToProto(fence)}
	if grace != nil {
		req.GracePeriod = durationpb.New(*grace)
	}
	stream, err := client.DeleteSandbox(ctx, req)
	if err != nil {
		return rpc.FromStatus(err)
	}
	removed := false
	for {
		m, err := stream.Recv()
		switch {
		case err != nil && removed:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("deleting %s: %w", fence, io.ErrUnexpectedEOF)
		case err != nil:
			return rpc.FromStatus(err)
		}
		stage(m.GetStage().String())
		removed = removed || m.GetStage() == agentv1.DeleteStage_DELETE_STAGE_REMOVED
	}
}

// formatGrace returns a grace period as the argument of a call: another one is another call.
func formatGrace(d *time.Duration) string {
	if d == nil {
		return ""
	}
	return d.String()
}

// removalResult explains why the container is removed. The causes of a failure or a refusal stay.
func removalResult(t *target, event lifecycle.Event) result {
	switch event { //nolint:exhaustive // the others have a cause of their own
	case lifecycle.DeleteRequested:
		return result{removing: true, cause: &cause{reasonTerminating, fmt.Sprintf("agent %s removes the container", t.assignment.AgentPod)}}
	case lifecycle.ExpireTimePassed:
		return result{removing: true, cause: &cause{reasonExpiring, fmt.Sprintf("the expire time has passed, and agent %s removes the container", t.assignment.AgentPod)}}
	case lifecycle.ResetRequested:
		return result{removing: true, cause: &cause{reasonResetting, fmt.Sprintf("a reset was requested, and agent %s removes the container", t.assignment.AgentPod)}}
	}
	return result{}
}

// removalBlocked explains why the container is not removed yet; nil if nothing is wrong.
func removalBlocked(t *target, call outcome, timing Timing) *cause {
	unreachable := &cause{reasonUnreachable, fmt.Sprintf("agent %s on node %s has not answered since %s; the container is removed when it does, or with its Pod: see kubectl describe pod %s",
		t.assignment.AgentPod, t.assignment.NodeName, stamp(call.first), t.assignment.AgentPod)}
	switch {
	case call.running && call.stage == "" && t.now.Sub(call.started) >= timing.Requeue:
		return unreachable
	case call.running && (t.now.Sub(call.first) < timing.Requeue || call.stage != ""):
		return nil
	case call.running: // the call before has failed
		return unreachable
	case fault.ReasonOf(call.err) == fault.LeaderSuperseded: // the current leader asks again
		return nil
	case errdefs.IsUnavailable(call.err), errdefs.IsDeadlineExceeded(call.err), errdefs.IsCanceled(call.err):
		return unreachable
	default:
		return &cause{reasonRemoveFailed, fmt.Sprintf("agent %s cannot remove the container, and is asked again: %s", t.assignment.AgentPod, messageOf(call.err))}
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
