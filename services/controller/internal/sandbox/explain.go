package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// What a state that lasts is said to wait for, in the conditions (the table of troubles of seed 002). A reason that is new
// is told in an Event, once.
const (
	// Of Pending, in the condition Scheduled.
	reasonPoolNotFound         = "PoolNotFound"
	reasonPoolDeleting         = "PoolDeleting"
	reasonNoAgent              = "NoAgent"
	reasonNoReadyAgent         = "NoReadyAgent"
	reasonNoCapacity           = "NoCapacity"
	reasonPortConflict         = "PortConflict"
	reasonAllocatorUnavailable = "AllocatorUnavailable"
	// Of Bound, in the condition Ready; failures of the agent come under their own names.
	reasonCreating     = "Creating"
	reasonPullingImage = "PullingImage"
	reasonNoAnswer     = "AgentNotAnswering"
	// Of a container that is to go, in the condition Ready.
	reasonTerminating  = "Terminating"
	reasonExpiring     = "Expiring"
	reasonResetting    = "Resetting"
	reasonUnreachable  = "AgentUnreachable"
	reasonRemoveFailed = "RemoveFailed"
)

// stuck tells that a reason of the condition Ready is worth an Event.
func stuck(reason string) bool {
	return reason == reasonPullingImage || reason == reasonNoAnswer || reason == reasonUnreachable || reason == reasonRemoveFailed
}

// whyUnplaced is what a person can do about a sandbox that found no place.
func (p *pass) whyUnplaced(ctx context.Context, refusal error) (reason, message string) {
	name := p.sandbox.Spec.PoolRef
	var pool v1alpha1.SandboxPool
	err := p.Client.Get(ctx, types.NamespacedName{Namespace: p.name.Namespace, Name: name}, &pool)
	code := fault.ReasonOf(refusal)
	switch {
	case errdefs.IsInvalidArgument(refusal):
		return camel(code), messageOf(refusal)
	case apierrors.IsNotFound(err), code == fault.PoolNotFound && err != nil:
		return reasonPoolNotFound, fmt.Sprintf("there is no SandboxPool %s in namespace %s; create it, or delete this Sandbox", name, p.name.Namespace)
	case err == nil && pool.DeletionTimestamp != nil:
		return reasonPoolDeleting, fmt.Sprintf("SandboxPool %s is being deleted and takes no new sandboxes; create it anew when it is gone, or delete this Sandbox", name)
	case code == fault.NoCapacity && p.Index.Synced():
		return p.whyNoCapacity(&pool)
	case code == fault.PortConflict:
		return reasonPortConflict, fmt.Sprintf("each agent with room has one of the ports %v taken; %s", p.sandbox.Spec.ExposedPorts, outlook(&pool))
	case errdefs.IsUnavailable(refusal), errdefs.IsDeadlineExceeded(refusal):
		return reasonAllocatorUnavailable, "the allocator does not answer, and is asked again: " + messageOf(refusal)
	}
	return camel(code), messageOf(refusal)
}

func (p *pass) whyNoCapacity(pool *v1alpha1.SandboxPool) (reason, message string) {
	known := p.Index.Pool(types.NamespacedName{Namespace: p.name.Namespace, Name: p.sandbox.Spec.PoolRef})
	ready, why := 0, map[string]int{}
	for _, a := range known {
		if a.GetReady() {
			ready++
		} else {
			why[cmp.Or(a.GetReason(), "NotReady")]++
		}
	}
	see := "; see kubectl describe sandboxpool " + pool.Name
	switch {
	case len(known) == 0:
		if c := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady); c != nil && c.Message != "" {
			see = ": " + c.Message + see
		}
		return reasonNoAgent, fmt.Sprintf("SandboxPool %s has no agent%s", pool.Name, see)
	case ready == 0:
		var parts []string
		for _, r := range slices.Sorted(maps.Keys(why)) {
			parts = append(parts, fmt.Sprintf("%d %s", why[r], r))
		}
		return reasonNoReadyAgent, fmt.Sprintf("no agent of SandboxPool %s takes sandboxes (%s)%s", pool.Name, strings.Join(parts, ", "), see)
	}
	return reasonNoCapacity, fmt.Sprintf("all places on %d agents of SandboxPool %s are taken; %s", ready, pool.Name, outlook(pool))
}

// outlook tells whether waiting helps.
func outlook(pool *v1alpha1.SandboxPool) string {
	if greatest := pool.Spec.Capacity.PoolMax; pool.Status.CurrentAgents-pool.Status.DrainingAgents >= greatest {
		return fmt.Sprintf("the pool has its poolMax of %d agents: raise it, or delete sandboxes", greatest)
	}
	return "another agent is on its way"
}

// explainCreate says how far a create is; the zero outcome is one that begins. What went wrong before stays said until
// one succeeds.
func (p *pass) explainCreate(o outcome) {
	t := p.ops.troubled(p.name)
	late := o.running && p.now.Sub(o.started) >= p.Timing.Requeue
	switch {
	case late && o.stage == "":
		p.explain(reasonNoAnswer, fmt.Sprintf("agent %s on node %s was asked at %s and has not answered; see the log of its Pod",
			p.assignment.AgentPod, p.assignment.NodeName, stamp(o.started)))
	case late && o.stage == agentv1.CreateStage_CREATE_STAGE_ADMITTED.String():
		p.explain(reasonPullingImage, fmt.Sprintf("agent %s pulls the image %s since %s", p.assignment.AgentPod, p.sandbox.Spec.Image, stamp(o.started)))
	case t.reason != "":
		p.explain(t.reason, t.message)
	default:
		p.explain(reasonCreating, "")
	}
}

// leaves notes for what the container goes. The reasons of a failure or a refusal stay.
func (p *pass) leaves(event lifecycle.Event) {
	switch event { //nolint:exhaustive // the others have said why already
	case lifecycle.DeleteRequested:
		p.leaving = true
		p.explain(reasonTerminating, fmt.Sprintf("agent %s ends the container", p.assignment.AgentPod))
	case lifecycle.ExpireTimePassed:
		p.leaving = true
		p.explain(reasonExpiring, fmt.Sprintf("the expire time has passed, and agent %s ends the container", p.assignment.AgentPod))
	case lifecycle.ResetRequested:
		p.leaving = true
		p.explain(reasonResetting, fmt.Sprintf("a reset is asked for, and agent %s ends the container", p.assignment.AgentPod))
	}
}

// explainRemoval says what keeps a container from going. Its status.reason tells for what it goes all the same.
func (p *pass) explainRemoval(o outcome) {
	if !p.leaving {
		return
	}
	away := fmt.Sprintf("agent %s on node %s does not answer since %s; the container goes when it does, or with its Pod: see kubectl describe pod %s",
		p.assignment.AgentPod, p.assignment.NodeName, stamp(o.first), p.assignment.AgentPod)
	switch {
	case o.running && o.stage == "" && p.now.Sub(o.started) >= p.Timing.Requeue:
		p.hindrance, p.message = reasonUnreachable, away
	case o.running && p.now.Sub(o.first) < p.Timing.Requeue, o.running && o.stage != "":
	case o.running: // the last one failed
		p.hindrance, p.message = reasonUnreachable, away
	case fault.ReasonOf(o.err) == fault.LeaderSuperseded: // whoever leads asks again
	case errdefs.IsUnavailable(o.err), errdefs.IsDeadlineExceeded(o.err), errdefs.IsCanceled(o.err):
		p.hindrance, p.message = reasonUnreachable, away
	default:
		p.hindrance = reasonRemoveFailed
		p.message = fmt.Sprintf("agent %s cannot remove the container, and is asked again: %s", p.assignment.AgentPod, messageOf(o.err))
	}
}

func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }
