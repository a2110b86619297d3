package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// unknownExitCode is the exit code of a process whose exit was not observed, as in containerd.
const unknownExitCode = 255

// reportObserver reads what the assigned agent reports of a sandbox, and the outcome of the create calls of this process.
type reportObserver struct {
	agents  *agentAccess
	creates *createObserver
	memory  *memory
	timing  Timing
}

// observe returns the event of the agent's report. The outcome of a create call of this process counts if it is newer.
func (o *reportObserver) observe(ctx context.Context, t *target) (observation, error) {
	report := o.agents.index.Report(t.fence())
	create, asked := o.creates.calls.get(t.name, t.fence())
	// After a create that succeeded, a report of an ended container is of an earlier create with the same fence.
	known := report != nil && report.GetState() != agentv1.SandboxState_SANDBOX_STATE_CREATING && !ended(report)
	switch {
	case asked && create.running && report.GetState() != agentv1.SandboxState_SANDBOX_STATE_RUNNING, asked && create.err != nil:
		return o.creates.observe(t, create), nil //nolint:nilerr // it knows more than the report
	case asked && !known && create.report != nil && t.now.Sub(create.ended) < o.timing.Requeue:
		seen := o.observeReport(t, create.report) // the response has overtaken the status stream
		seen.requeue = sooner(seen.requeue, after(o.timing.Requeue))
		return seen, nil
	case asked && !create.running:
		o.creates.calls.drop(t.name, t.fence())
	}
	switch {
	case ended(report) && t.sandbox.Status.Phase == v1alpha1.PhaseRunning: // perhaps of an earlier create: the Registry may be late
		return o.observeMissing(ctx, t)
	case report != nil:
		return o.observeReport(t, report), nil
	case t.toCreate():
		return observation{event: lifecycle.Scheduled}, nil
	}
	return o.observeMissing(ctx, t)
}

// ended reports whether a report says that the container failed or was removed.
func ended(r *agentv1.SandboxReport) bool {
	s := r.GetState()
	return s == agentv1.SandboxState_SANDBOX_STATE_FAILED || s == agentv1.SandboxState_SANDBOX_STATE_TERMINATED
}

func (o *reportObserver) observeReport(t *target, r *agentv1.SandboxReport) observation {
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_CREATING:
		seen := observation{result: result{requeue: after(o.timing.Requeue)}}
		if t.sandbox.Status.Phase != v1alpha1.PhaseRunning { // else the report is older than the acknowledgment of the create
			seen.event, seen.cause = lifecycle.AgentCreating, &cause{reasonCreating, ""}
		}
		return seen
	case agentv1.SandboxState_SANDBOX_STATE_RUNNING:
		recordReport(&t.sandbox.Status, r)
		o.memory.createSucceeded(t.name)
		if t.sandbox.Status.Phase == v1alpha1.PhaseFailed {
			return observation{}
		}
		return observation{event: lifecycle.AgentRunning}
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED:
		if recreates(t, r) {
			return observation{event: lifecycle.RuntimeLost, result: result{cause: &cause{lifecycle.ReasonRuntimeLost, r.GetMessage()}}}
		}
		recordReport(&t.sandbox.Status, r)
		seen := observation{event: lifecycle.AgentCrashed, result: result{cause: exitCause(r, *t.sandbox.Status.ExitCode)}}
		if r.ExitCode != nil && r.GetExitCode() == 0 {
			seen.event = lifecycle.AgentCompleted
		}
		return seen
	case agentv1.SandboxState_SANDBOX_STATE_FAILED:
		return o.creates.observeReported(t, r)
	case agentv1.SandboxState_SANDBOX_STATE_TERMINATED:
		if t.toCreate() { // a create of another process failed or was canceled, and left nothing
			return observation{event: lifecycle.Scheduled}
		}
		return observation{event: lifecycle.AgentTerminated,
			result: result{cause: &cause{"ContainerGone", "the agent reports that the container was removed, which this controller did not request"}}}
	default: // terminating: another component deletes it, and the next report follows
		return observation{result: result{requeue: after(o.timing.Requeue)}}
	}
}

// recreates reports whether a sandbox is created again whose process has ended: only if that was not the process's doing, and not if it was
// seen to end before the policy asked for that.
func recreates(t *target, r *agentv1.SandboxReport) bool {
	return r.GetReason() == lifecycle.ReasonRuntimeLost && t.sandbox.Spec.FailurePolicy == v1alpha1.FailurePolicyAutoRecreate &&
		t.sandbox.Status.Phase != v1alpha1.PhaseFailed
}

// observeMissing handles a sandbox that should be on its agent, but of which the Registry has no current report. The Registry
// may be late, so that only the agent itself counts.
func (o *reportObserver) observeMissing(ctx context.Context, t *target) (observation, error) {
	later := result{requeue: after(o.timing.Requeue)}
	if t.base.Status.Phase == "" { // the resource may have overtaken the Registry
		seen := observation{result: later}
		if t.sandbox.Status.Phase != v1alpha1.PhaseRunning {
			seen.event = lifecycle.AgentCreating
		}
		return seen, nil
	}
	if !o.agents.index.Synced() {
		return observation{}, nil // all assigned sandboxes are reconciled when it is
	}
	report, err := o.agents.ask(ctx, t.name, t.fence(), o.agents.address(ctx, t.name.Namespace, t.fence(), t.assignment))
	if err != nil {
		return observation{result: later}, nil //nolint:nilerr // no answer proves nothing; the loss detector decides
	}
	if report != nil {
		seen := o.observeReport(t, report)
		seen.result = later.merge(seen.result) // the Registry may have nothing more to report
		return seen, nil
	}
	return observation{event: lifecycle.AgentTerminated, result: result{cause: &cause{"ContainerGone", "the agent has no container of this sandbox"}}}, nil
}

// createObserver reads the outcome of creates.
type createObserver struct {
	calls  *calls
	memory *memory
	timing Timing
	events eventWriter
}

// maxCreateFailures is how often a create is tried on one agent before another one is chosen.
const maxCreateFailures = 3

// maxSupersededDelay bounds the time after which a create that was refused as superseded is retried.
const maxSupersededDelay = time.Second

// observeReported handles a failed create for which this process has no response: it was requested by another process, which
// died or lost leadership. That alone may be why it failed. It is handled like a create of this process.
func (o *createObserver) observeReported(t *target, r *agentv1.SandboxReport) observation {
	reason := cmp.Or(fault.Reason(r.GetReason()), fault.Internal)
	if t.toCreate() && !requestAtFault(reason) {
		err := fault.New(errdefs.ErrUnavailable, reason, "%s", r.GetMessage())
		return o.observe(t, o.calls.recordFailure(t.name, t.fence(), err))
	}
	return observation{event: lifecycle.AgentFailed, result: result{cause: &cause{camel(reason), r.GetMessage()}}}
}

// observe returns the event of a create call of this process.
func (o *createObserver) observe(t *target, call outcome) observation {
	seen := observation{result: result{requeue: after(o.timing.Requeue)}}
	if call.running || call.err == nil {
		seen.cause = createCause(t, call, o.timing, o.memory.lastError(t.name))
		if t.sandbox.Status.Phase != v1alpha1.PhaseRunning {
			seen.event = lifecycle.AgentCreating
		}
		return seen
	}
	reason := fault.ReasonOf(call.err)
	seen.cause = &cause{camel(reason), messageOf(call.err)}
	switch {
	case errdefs.IsAlreadyExists(call.err): // with this fence: the agent will report it
		return seen
	case reason == fault.LeaderSuperseded:
		return seen.with(o.superseded(t, call))
	case requestAtFault(reason):
		seen.event = lifecycle.AgentFailed
		return seen
	case agentRefuses(reason):
		return seen.with(o.refused(t, call.err))
	default:
		return seen.with(o.failed(t, call))
	}
}

// failed retries a create after a while, and chooses another agent after several failures.
func (o *createObserver) failed(t *target, call outcome) observation {
	why := cause{camel(fault.ReasonOf(call.err)), fmt.Sprintf("agent %s could not create the container, and is asked again: %s", t.assignment.AgentPod, messageOf(call.err))}
	o.memory.setLastError(t.name, why)
	seen := observation{result: result{cause: &why}}
	wait := o.timing.Requeue
	if d, ok := fault.RetryAfter(call.err); ok {
		wait = min(d, wait)
	}
	if left := wait - t.now.Sub(call.ended); left > 0 {
		seen.requeue = after(left)
		return seen
	}
	if o.memory.createFailed(t.name) >= maxCreateFailures {
		return seen.with(o.refused(t, call.err))
	}
	o.calls.drop(t.name, t.fence())
	seen.event = lifecycle.Scheduled
	return seen
}

// superseded handles a create that the agent refused because it knows a later leader, or because the Lease of this process
// was recreated. It says nothing about the sandbox or the agent: the current leader asks again, with its term.
func (o *createObserver) superseded(t *target, call outcome) observation {
	seen := observation{result: result{cause: createCause(t, outcome{}, o.timing, o.memory.lastError(t.name))}}
	wait := min(o.timing.Requeue, maxSupersededDelay)
	if left := wait - t.now.Sub(call.ended); left > 0 {
		seen.requeue = after(left)
		return seen
	}
	o.calls.drop(t.name, t.fence())
	seen.event = lifecycle.Scheduled
	return seen
}

// refused excludes the agent for a while.
func (o *createObserver) refused(t *target, err error) observation {
	seen := observation{event: lifecycle.AgentRefused}
	if !slices.Contains(o.memory.excluded(t.name), t.assignment.AgentUID) { // not while its removal is waited for
		o.events.warn(t.sandbox, camel(fault.ReasonOf(err)), "Create",
			fmt.Sprintf("agent %s refused the sandbox, another agent is chosen: %s", t.assignment.AgentPod, messageOf(err)))
		seen.warned = true
	}
	o.memory.exclude(t.name, t.assignment.AgentUID, exclusionFactor*o.timing.Requeue)
	return seen
}

// requestAtFault reports whether no agent can ever create the container.
func requestAtFault(r fault.Reason) bool {
	switch r { //nolint:exhaustive // the others can pass
	case fault.ImageNotFound, fault.ImageInvalid, fault.CommandNotFound, fault.CommandNotExecutable, fault.UserNotFound, fault.WorkingDirInvalid,
		fault.InvalidField:
		return true
	}
	return false
}

// agentRefuses reports whether another agent may create the container now.
func agentRefuses(r fault.Reason) bool {
	switch r { //nolint:exhaustive // the others are retried on the same agent first
	case fault.NoCapacity, fault.PortConflict, fault.FenceMismatch, fault.Overloaded, fault.SandboxTerminating, fault.RuntimeUnavailable,
		fault.AgentDraining:
		return true
	}
	return false
}

// recordReport copies a report into the status.
func recordReport(st *v1alpha1.SandboxStatus, r *agentv1.SandboxReport) {
	st.SandboxID, st.Endpoints = r.GetContainerId(), slices.Clone(r.GetEndpoints())
	st.StartTime, st.StartPath = micro(r.GetStartTime()), convert.StartPathFromProto(r.GetStartPath())
	st.FinishTime, st.ExitCode = micro(r.GetFinishTime()), nil
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
		st.ExitCode = ptr.To(int32(unknownExitCode))
		if r.ExitCode != nil {
			st.ExitCode = ptr.To(r.GetExitCode())
		}
	}
}

// exitCause explains the end of a process.
func exitCause(r *agentv1.SandboxReport, code int32) *cause {
	reason := lifecycle.ReasonError
	if code == 0 {
		reason = lifecycle.ReasonCompleted
	}
	return &cause{cmp.Or(r.GetReason(), reason), cmp.Or(r.GetMessage(), fmt.Sprintf("the process ended with code %d", code))}
}

func micro(t *timestamppb.Timestamp) *metav1.MicroTime {
	if t == nil {
		return nil
	}
	return &metav1.MicroTime{Time: t.AsTime().Truncate(1000)}
}
