package sandbox

import (
	"context"
	"fmt"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// removeSuperseded removes the containers of the attempts that a sandbox superseded, and returns what it waits for; nil if they
// are removed. Once the resource is gone, the allocator would take such a container for an acknowledged sandbox whose resource
// was never written.
func (r *remover) removeSuperseded(ctx context.Context, t *target) (*result, error) {
	if t.assignment == nil {
		return nil, nil
	}
	var waiting *result
	for _, s := range t.assignment.Superseded {
		left, err := r.removeAttempt(ctx, t, s)
		if err != nil {
			return nil, err
		}
		if left != nil {
			waiting = left
		}
	}
	return waiting, nil
}

// removeAttempt removes the container of a superseded attempt. Only one that its agent reports under the name of the sandbox is
// removed: users can write what the annotation says.
func (r *remover) removeAttempt(ctx context.Context, t *target, s v1alpha1.Superseded) (*result, error) {
	at := v1alpha1.Assignment{AgentPod: s.AgentPod, AgentUID: s.AgentUID, AgentAddress: s.AgentAddress, SandboxUID: s.SandboxUID, Attempt: s.Attempt}
	fence := fenceOf(at)
	gone, err := r.deleter.agents.podGone(ctx, t.name.Namespace, at)
	if err != nil || gone {
		return nil, err
	}
	waiting := &result{removing: true, requeue: after(r.timing.DeletionPoll)}
	report, known := r.reportOf(ctx, t, fence)
	switch {
	case !known:
		waiting.blocked = &cause{reasonUnreachable, fmt.Sprintf("agent %s has not said yet whether it has a container of an earlier attempt to create the sandbox; the deletion ends when it does, or with its Pod: see kubectl describe pod %s",
			s.AgentPod, s.AgentPod)}
		return waiting, nil
	case report == nil, report.GetState() == agentv1.SandboxState_SANDBOX_STATE_TERMINATED, !named(report, t.name):
		return nil, nil
	}
	r.removeContainer(ctx, t, fence)
	return waiting, nil
}

// reportOf returns an agent's report of a container, nil if it has none; false if it has not said whether it has one. An agent that
// accepts no sandboxes is asked itself: one that drains would otherwise hold up the deletion until its other sandboxes have ended.
func (r *remover) reportOf(ctx context.Context, t *target, f identity.Fence) (report *agentv1.SandboxReport, known bool) {
	access := r.deleter.agents
	if report := access.index.Report(f); report != nil {
		return report, true
	}
	switch access.index.Status(f.AgentUID) {
	case agents.Ready:
		return nil, true
	case agents.NotReady:
		report, err := access.ask(ctx, t.name, f, access.address(ctx, t.name.Namespace, f, nil))
		return report, err == nil
	case agents.Unknown, agents.Silent, agents.Absent:
	}
	return nil, false
}

// removeContainer removes a container other than that of the assignment in force. A call that has failed is made again the
// next time.
func (r *remover) removeContainer(ctx context.Context, t *target, fence identity.Fence) {
	if call, ok := r.deletes.get(t.name, fence); ok && !call.running {
		r.deletes.drop(t.name, fence)
		return
	}
	r.start(ctx, t, fence)
}
