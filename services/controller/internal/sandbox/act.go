package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// releaseTimeout bounds a call that needs memory alone.
const releaseTimeout = 2 * time.Second

// act carries the actions out, one after the other; false if one of them has to be waited for.
func (p *pass) act(ctx context.Context, event lifecycle.Event, actions []lifecycle.Action) (bool, error) {
	for _, a := range actions {
		done, err := p.actOne(ctx, event, a)
		if err != nil || !done {
			return false, err
		}
	}
	return true, nil
}

func (p *pass) actOne(ctx context.Context, event lifecycle.Event, a lifecycle.Action) (bool, error) {
	switch a {
	case lifecycle.Allocate:
		return p.allocate(ctx)
	case lifecycle.Create:
		p.create(ctx)
		return false, nil
	case lifecycle.Remove:
		return p.remove(ctx, event)
	case lifecycle.Release:
		return p.release(ctx)
	case lifecycle.AcceptReset:
		p.sandbox.Status.AcceptedResetRevision = p.sandbox.Spec.ResetRevision
		p.forgetEnd()
		return true, nil
	case lifecycle.RecordEnd:
		p.recordEnd()
		return false, nil
	case lifecycle.MarkLost:
		return false, nil // conclude sets the condition
	case lifecycle.Finalize:
		return true, p.finalize(ctx)
	default:
		return false, fmt.Errorf("event %s asks for an unknown action %q", event, a)
	}
}

// remove asks the agent to end the container and waits for its word, or for the end of its Pod; the release follows, at
// once or, in a deletion, as the next event.
func (p *pass) remove(ctx context.Context, event lifecycle.Event) (bool, error) {
	if o, ok := p.ops.look(p.name, p.key(opCreate)); ok && o.running {
		p.ops.drop(p.name, p.key(opCreate)) // leaving its stream cancels the create
	}
	p.after(p.Timing.DeletionPoll)
	p.leaves(event)
	o, ok := p.ops.look(p.name, p.key(opDelete))
	if ok && !o.running && o.err == nil {
		return p.afterRemoval(ctx)
	}
	// A call to an agent that is no more may take long to fail.
	gone, err := p.podGone(ctx)
	if err != nil {
		return false, err
	}
	if gone {
		p.ops.drop(p.name, p.key(opDelete))
		return p.afterRemoval(ctx)
	}
	if ok {
		p.explainRemoval(o)
	}
	if ok && (o.running || p.now.Sub(o.ended) < p.Timing.DeletionPoll) {
		return false, nil
	}
	p.ops.drop(p.name, p.key(opDelete))
	p.startDelete(ctx, p.fence(), p.key(opDelete))
	return false, nil
}

func (p *pass) afterRemoval(ctx context.Context) (bool, error) {
	if p.sandbox.DeletionTimestamp != nil {
		p.removed = true
		return true, nil
	}
	return p.release(ctx)
}

// startDelete has a container deleted beside this pass. It goes on at the agent whatever becomes of the call.
func (p *pass) startDelete(ctx context.Context, fence *agentv1.Fence, key opKey) {
	address, grace := p.addressOf(fence), p.grace()
	p.ops.start(p.linked(ctx), p.name, key, func(ctx context.Context, heard func(string)) (*agentv1.SandboxReport, error) {
		return nil, p.deleteWithin(ctx, grace, address, fence, heard)
	})
}

func (p *pass) grace() time.Duration {
	if g := p.sandbox.Spec.TerminationGracePeriodSeconds; g != nil {
		return time.Duration(*g) * time.Second
	}
	return 10 * time.Second
}

// deleteWithin has a container deleted that may take its grace period to end.
func (r *Reconciler) deleteWithin(ctx context.Context, grace time.Duration, address string, fence *agentv1.Fence, heard func(string)) error {
	ctx, cancel := context.WithTimeout(ctx, grace+time.Minute)
	defer cancel()
	ctx, span := obs.Tracer().Start(ctx, "sandbox.delete")
	defer span.End()
	started := r.Clock.Now()
	err := deleteOn(ctx, r.Agents, address, fence, heard)
	r.metrics.calls.WithLabelValues(string(opDelete), result(err)).Observe(r.Clock.Since(started).Seconds())
	return err
}

func deleteOn(ctx context.Context, agents Agents, address string, fence *agentv1.Fence, heard func(string)) error {
	c, err := agents.Client(address)
	if err != nil {
		return err
	}
	stream, err := c.DeleteSandbox(ctx, &agentv1.DeleteSandboxRequest{Fence: fence})
	if err != nil {
		return rpc.FromStatus(err)
	}
	removed := false
	for {
		m, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF) && removed:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("deleting %s-%d: %w", fence.GetSandboxUid(), fence.GetAttempt(), io.ErrUnexpectedEOF)
		case err != nil && removed:
			return nil
		case err != nil:
			return rpc.FromStatus(err)
		}
		heard(m.GetStage().String())
		removed = removed || m.GetStage() == agentv1.DeleteStage_DELETE_STAGE_REMOVED
	}
}

// addressOf prefers the Registry's word: an agent's Pod may have another address after its sandbox was made anew.
func (p *pass) addressOf(fence *agentv1.Fence) string {
	assigned := ""
	if p.assignment != nil && p.assignment.AgentUID == fence.GetAgentUid() {
		assigned = p.assignment.AgentAddress
	}
	return p.addressNow(fence.GetAgentUid(), assigned)
}

func (r *Reconciler) addressNow(agentUID, assigned string) string {
	if a, ok := r.Index.Agent(agentUID); ok && a.GetAddress() != "" {
		return a.GetAddress()
	}
	return assigned
}

// release gives the place up and clears the assignment. The number of the attempt, and a failure, must be durable before
// that: they cannot be told afterwards.
func (p *pass) release(ctx context.Context) (bool, error) {
	if p.assignment == nil { // deleted without ever having been assigned
		return true, nil
	}
	failing := p.sandbox.Status.Phase == v1alpha1.PhaseFailed && p.base.Status.Phase != v1alpha1.PhaseFailed
	deleting := p.sandbox.DeletionTimestamp != nil
	if !deleting && (p.base.Status.Attempt < p.assignment.Attempt || failing) {
		p.after(time.Millisecond)
		return false, nil
	}
	if err := p.giveUp(ctx, p.fence()); err != nil {
		// The container is gone: the Registry hears that from the agent, or loses the agent. A deletion waits for nobody.
		if !deleting {
			return false, fmt.Errorf("releasing place: %w", err)
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("place not released", "err", err.Error())
	}
	p.ops.finish(p.name, p.key(opCreate))
	p.ops.finish(p.name, p.key(opDelete))
	if deleting {
		return true, nil
	}
	p.sandbox.SetAssignment(nil)
	delete(p.sandbox.Labels, v1alpha1.LabelNode)
	if err := p.writeMetadata(ctx); err != nil {
		return false, fmt.Errorf("clearing assignment: %w", err)
	}
	p.assignment, p.lost = nil, false
	st := &p.sandbox.Status
	st.AssignedPod, st.NodeName, st.SandboxID, st.Endpoints = "", "", "", nil
	return true, nil
}

func (r *Reconciler) giveUp(ctx context.Context, fence *agentv1.Fence) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	_, err := r.Allocator.Release(ctx, &allocatorv1.ReleaseRequest{Fence: fence})
	if err := rpc.FromStatus(err); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	return nil
}

func (p *pass) finalize(ctx context.Context) error {
	controllerutil.RemoveFinalizer(p.sandbox, v1alpha1.Finalizer)
	if err := p.writeMetadata(ctx); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing finalizer: %w", err)
	}
	p.finalized = true
	return nil
}

// removeStale has containers of earlier attempts deleted, for instance of an agent that was lost and has come back. An
// attempt's number never comes again, so that even an old view of the sandbox is right about what is stale.
func (p *pass) removeStale(ctx context.Context) {
	current := p.sandbox.Status.Attempt + 1
	if p.assignment != nil {
		current = p.assignment.Attempt
	}
	for _, r := range p.Index.Reports(p.sandbox.EffectiveUID()) {
		f := r.GetRecord().GetFence()
		if f.GetAttempt() >= current || r.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATING {
			continue
		}
		key := opKey{opDelete, f.GetSandboxUid(), f.GetAttempt(), f.GetAgentUid()}
		if o, ok := p.ops.look(p.name, key); ok && !o.running {
			p.ops.drop(p.name, key)
			p.after(p.Timing.DeletionPoll)
			continue
		}
		p.startDelete(ctx, f, key)
	}
}
