package create

import (
	"context"
	"maps"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// maxInternal bounds on how many agents a create is tried that makes agents fail internally.
const maxInternal = 3

// schedule asks one agent after the other until one runs the sandbox, the request itself turns out to be at fault, no
// candidate is left, or ctx ends. After an error nothing is left, unless the error says that the outcome is unknown: then
// what may be left is being deleted in the background, as long as this process lives.
func (c *Creator) schedule(ctx context.Context, k *call) error {
	var exclude []string
	var uncertain []identity.Fence // attempts of which it is not known what became
	var last error
	internal := 0
	fail := func(err error) error {
		if slices.ContainsFunc(uncertain, c.config.Deletions.Deleting) {
			return fault.Unsettled(err)
		}
		return err
	}
	for attempt := int64(1); ; attempt++ {
		if ctx.Err() != nil {
			return fail(fault.FromContext(ctx, "creating the sandbox", last))
		}
		placed, known, err := c.tryOne(ctx, k, attempt, exclude)
		switch {
		case err == nil:
			return nil
		case placed == nil: // nothing was reserved
			if last != nil {
				err = last
			}
			return fail(err)
		}
		fence := identity.FenceOf(placed.GetFence())
		if known {
			c.config.Fleet.Release(placed.GetFence())
		} else { // the capacity stays reserved until it is known what became of the attempt
			c.config.Deletions.Container(placed.GetFence())
			if !rejectedBeforeExecution(err) {
				uncertain = append(uncertain, fence)
				c.trackUnsettled(k.name, placed)
			}
		}
		if fault.ReasonOf(err) == fault.LeaderSuperseded {
			// Another process decides now. What became of this attempt is its to find out, too.
			return fail(deletion.LostLeadership(err))
		}
		if fault.ReasonOf(err) == fault.Internal {
			internal++
		}
		if ctx.Err() == nil && (!retryable(err) || internal >= maxInternal) {
			return fail(err)
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("trying the next agent", obs.KeySandbox, k.name.String(),
			obs.KeyAgent, placed.GetAgentPod(), obs.KeyError, err.Error())
		exclude = append(exclude, fence.AgentUID)
		last = err
	}
}

// tryOne reserves capacity and starts the sandbox there. With an error, the assignment is nil if nothing was reserved, and
// known says that nothing of the sandbox is left on the agent. Each attempt's container has an id of its own: what an agent is
// still cleaning up may be on the same node.
func (c *Creator) tryOne(ctx context.Context, k *call, attempt int64, exclude []string) (placed *allocatorv1.Assignment, known bool, err error) {
	var timings stages
	began := c.config.Clock.Now()
	assignment, err := c.reserve(ctx, k, attempt, exclude)
	if err != nil {
		return nil, true, err
	}
	timings.add("reserve", c.config.Clock.Since(began))
	record := proto.CloneOf(k.record)
	record.Fence, record.Superseded = assignment.GetFence(), c.superseded(k.name)
	report, known, err := c.start(ctx, record, &timings)
	if err == nil && ctx.Err() != nil { // there is no caller to answer
		err, known = ctx.Err(), false
	}
	if err != nil {
		return assignment, known, err
	}
	k.timings = append(k.timings, timings...)
	k.placed = &store.Record{
		Record: record, Report: report, AgentPod: assignment.GetAgentPod(), NodeName: assignment.GetNodeName(),
		AgentAddress: assignment.GetAgentAddress(),
	}
	return assignment, true, nil
}

// trackUnsettled notes an attempt of which it is not known what became, and whose container is being deleted.
func (c *Creator) trackUnsettled(name store.Key, a *allocatorv1.Assignment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	maps.DeleteFunc(c.unsettled, func(_ store.Key, attempts []*agentv1.SupersededAttempt) bool {
		return !slices.ContainsFunc(attempts, c.deleting)
	})
	attempts := slices.DeleteFunc(c.unsettled[name], func(a *agentv1.SupersededAttempt) bool { return !c.deleting(a) })
	c.unsettled[name] = append(attempts, &agentv1.SupersededAttempt{Fence: a.GetFence(), AgentPod: a.GetAgentPod(), AgentAddress: a.GetAgentAddress()})
}

func (c *Creator) deleting(a *agentv1.SupersededAttempt) bool {
	return c.config.Deletions.Deleting(identity.FenceOf(a.GetFence()))
}

// Unsettled reports whether a create under the name may still have left a container.
func (c *Creator) Unsettled(name store.Key) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.ContainsFunc(c.unsettled[name], c.deleting)
}

// maxSuperseded is how many attempts a record holds at most; the agent refuses more.
const maxSuperseded = 64

// superseded returns the attempts under a name that may still have left a container. The record of the next attempt holds
// them: if this process ends, and that sandbox is deleted, nothing else says that they must not be adopted.
func (c *Creator) superseded(name store.Key) []*agentv1.SupersededAttempt {
	c.mu.Lock()
	defer c.mu.Unlock()
	var left []*agentv1.SupersededAttempt
	for _, a := range c.unsettled[name] {
		if c.deleting(a) {
			left = append(left, a)
		}
	}
	return left[max(0, len(left)-maxSuperseded):]
}

func (c *Creator) reserve(ctx context.Context, k *call, attempt int64, exclude []string) (*allocatorv1.Assignment, error) {
	_, span := obs.Tracer().Start(ctx, "reserve")
	defer span.End()
	a, err := c.config.Fleet.Reserve(registry.Request{
		Fence: identity.Fence{SandboxUID: k.record.GetFence().GetSandboxUid(), Attempt: attempt},
		Pool:  registry.Pool{Namespace: k.record.GetNamespace(), Name: k.record.GetSpec().GetPool()},
		Image: k.plan.Image, Ports: fleet.SharedPorts(k.record.GetSpec()), Exclude: exclude,
		Demand: fleet.Demand(k.record.GetLimits()), New: true,
	})
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return nil, err
	}
	span.SetAttributes(attribute.String(obs.AttrAgentPod, a.GetAgentPod()), attribute.String(obs.AttrSandboxUID, a.GetFence().GetSandboxUid()))
	return a, nil
}

// retryable reports whether another agent may do what this one could not: what the agent lacks, as against what the request
// does.
func retryable(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.NoCapacity, fault.PortConflict, fault.AgentUnavailable, fault.RuntimeUnavailable, fault.ImagePullFailed,
		fault.FenceMismatch, fault.Overloaded, fault.Internal, fault.AgentDraining, fault.DeadlineExceeded, fault.Cancelled:
		return true
	}
	return false
}

// rejectedBeforeExecution reports whether an agent has refused a call for its term, and did nothing of it. A create that a
// later leader cut off in the middle is Canceled.
func rejectedBeforeExecution(err error) bool {
	return fault.ReasonOf(err) == fault.LeaderSuperseded && errdefs.IsFailedPrecondition(err)
}

// stageName returns the name of a stage in the answer's timings; empty for one that is not shown.
func stageName(s agentv1.CreateStage) string {
	switch s {
	case agentv1.CreateStage_CREATE_STAGE_ADMITTED:
		return "admitted"
	case agentv1.CreateStage_CREATE_STAGE_IMAGE:
		return "image"
	case agentv1.CreateStage_CREATE_STAGE_SNAPSHOT:
		return "snapshot"
	case agentv1.CreateStage_CREATE_STAGE_CONTAINER:
		return "container"
	case agentv1.CreateStage_CREATE_STAGE_CLAIM:
		return "claim"
	case agentv1.CreateStage_CREATE_STAGE_TASK:
		return "task"
	case agentv1.CreateStage_CREATE_STAGE_STARTED:
		return "started"
	}
	return ""
}
