package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// Reasons of the conditions for a state that lasts (seed 002). A new reason is also reported by an Event.
const (
	// For Pending, in the condition Scheduled.
	reasonPoolNotFound         = "PoolNotFound"
	reasonPoolDeleting         = "PoolDeleting"
	reasonNoAgent              = "NoAgent"
	reasonNoReadyAgent         = "NoReadyAgent"
	reasonNoCapacity           = "NoCapacity"
	reasonPortConflict         = "PortConflict"
	reasonAllocatorUnavailable = "AllocatorUnavailable"
	// For Bound, in the condition Ready. An error of the agent has its own reason.
	reasonCreating     = "Creating"
	reasonPullingImage = "PullingImage"
	reasonNotAnswering = "AgentNotAnswering"
	// For a container that is being removed, in the condition Ready.
	reasonTerminating  = "Terminating"
	reasonExpiring     = "Expiring"
	reasonResetting    = "Resetting"
	reasonUnreachable  = "AgentUnreachable"
	reasonRemoveFailed = "RemoveFailed"
)

// explainer explains why no agent was found for a sandbox, and what a user can do about it.
type explainer struct {
	pools *pools
	index poolAgents
}

// poolAgents are the agents of pools. *agents.Index implements it.
type poolAgents interface {
	Synced() bool
	Pool(pool types.NamespacedName) []agents.Agent
}

// unplaced returns the cause of an error of the allocator.
func (e *explainer) unplaced(ctx context.Context, t *target, refusal error) cause {
	name := t.sandbox.Pool()
	pool, err := e.pools.get(ctx, t)
	code := fault.ReasonOf(refusal)
	switch {
	case errdefs.IsInvalidArgument(refusal):
		return cause{camel(code), messageOf(refusal)}
	case apierrors.IsNotFound(err), code == fault.PoolNotFound && err != nil:
		return cause{reasonPoolNotFound, fmt.Sprintf("there is no SandboxPool %s in namespace %s; create it, or delete this Sandbox", name, t.name.Namespace)}
	case err == nil && pool.DeletionTimestamp != nil:
		return cause{reasonPoolDeleting, fmt.Sprintf("SandboxPool %s is being deleted and accepts no new sandboxes; create it again after it is deleted, or delete this Sandbox", name)}
	case code == fault.NoCapacity && err == nil && e.index.Synced():
		return e.noCapacity(t, pool)
	case code == fault.PortConflict && err == nil:
		return cause{reasonPortConflict, fmt.Sprintf("on each agent with free capacity, one of the ports %v is in use; %s", t.sandbox.Spec.ExposedPorts, growth(pool))}
	case errdefs.IsUnavailable(refusal), errdefs.IsDeadlineExceeded(refusal):
		return cause{reasonAllocatorUnavailable, "the allocator does not answer, and is asked again: " + messageOf(refusal)}
	}
	return cause{camel(code), messageOf(refusal)}
}

func (e *explainer) noCapacity(t *target, pool *v1alpha1.SandboxPool) cause {
	known := e.index.Pool(e.pools.key(t))
	ready, notReady := 0, map[string]int{}
	for _, a := range known {
		if a.GetReady() {
			ready++
		} else {
			notReady[cmp.Or(a.GetReason(), "NotReady")]++
		}
	}
	see := "; see kubectl describe sandboxpool " + pool.Name
	switch {
	case len(known) == 0:
		if c := meta.FindStatusCondition(pool.Status.Conditions, v1alpha1.ConditionReady); c != nil && c.Message != "" {
			see = ": " + c.Message + see
		}
		return cause{reasonNoAgent, fmt.Sprintf("SandboxPool %s has no agent%s", pool.Name, see)}
	case ready == 0:
		var parts []string
		for _, r := range slices.Sorted(maps.Keys(notReady)) {
			parts = append(parts, fmt.Sprintf("%d %s", notReady[r], r))
		}
		return cause{reasonNoReadyAgent, fmt.Sprintf("no agent of SandboxPool %s is ready (%s)%s", pool.Name, strings.Join(parts, ", "), see)}
	}
	return cause{reasonNoCapacity, fmt.Sprintf("the %d agents of SandboxPool %s have no free capacity; %s", ready, pool.Name, growth(pool))}
}

// growth explains whether the pool will get another agent.
func growth(pool *v1alpha1.SandboxPool) string {
	if limit := pool.Spec.Capacity.PoolMax; pool.Status.CurrentAgents-pool.Status.DrainingAgents >= limit {
		return fmt.Sprintf("the pool has its poolMax of %d agents: raise it, or delete sandboxes", limit)
	}
	return "another agent is being created"
}

// camel converts a fault's reason, such as NO_CAPACITY, to that of a condition, NoCapacity.
func camel(r fault.Reason) string {
	var b strings.Builder
	for word := range strings.SplitSeq(string(r), "_") {
		if word != "" {
			b.WriteString(word[:1] + strings.ToLower(word[1:]))
		}
	}
	return cmp.Or(b.String(), "Unknown")
}
