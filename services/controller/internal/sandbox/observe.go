package sandbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// Reasons of the condition Scheduled that tell who made the assignment.
const (
	// reasonFastPath: the allocator, which had the container created before the resource came to be.
	reasonFastPath = "FastPath"
	// reasonAssigned: this controller, which has to ask for the container.
	reasonAssigned = "Assigned"
)

// maxCreateFailures is how often a create is tried on one agent before another one is looked for.
const maxCreateFailures = 3

// observe returns the one event that matters most now; false if there is none.
func (p *pass) observe(ctx context.Context) (lifecycle.Event, bool, error) {
	if p.sandbox.DeletionTimestamp != nil {
		if p.removed {
			return lifecycle.AgentTerminated, true, nil
		}
		return lifecycle.DeleteRequested, true, nil
	}
	if p.observeAcknowledged() {
		return lifecycle.AgentRunning, true, nil
	}
	if err := p.observeLoss(ctx); err != nil {
		return 0, false, err
	}
	if e, ok := p.observeClock(); ok {
		return e, true, nil
	}
	if p.resetRequested() {
		if p.lost {
			return lifecycle.ResetWhileLost, true, nil
		}
		return lifecycle.ResetRequested, true, nil
	}
	if p.assignment == nil {
		return p.observeUnassigned()
	}
	if p.sandbox.Status.Phase == v1alpha1.PhaseFailed && p.sandbox.Status.ExitCode == nil {
		return lifecycle.AgentFailed, true, nil // never ran, and something may be left of the attempt
	}
	if p.lost {
		return p.observeLost()
	}
	return p.observeAgent(ctx)
}

// observeAcknowledged reports whether the sandbox was acknowledged on the fast path and has no status yet. Its caller knows
// that it runs, so it is Running before anything else is judged, even if its agent is lost by now.
func (p *pass) observeAcknowledged() bool {
	if p.sandbox.Status.Phase != "" || p.assignment == nil || p.assignment.Started == nil {
		return false
	}
	st := p.sandbox.EffectiveStatus()
	p.sandbox.Status.SandboxID, p.sandbox.Status.Endpoints = st.SandboxID, st.Endpoints
	p.sandbox.Status.StartTime, p.sandbox.Status.StartPath = st.StartTime, st.StartPath
	return true
}

// observeClock looks at the expire time, and has the sandbox looked at again shortly before and exactly at it.
func (p *pass) observeClock() (lifecycle.Event, bool) {
	expire := p.sandbox.Spec.ExpireTime
	if p.expiring() { // moved or taken away after the container was told to end: too late
		expire = &metav1.Time{Time: p.now}
	}
	if expire == nil {
		return 0, false
	}
	left := expire.Sub(p.now)
	switch {
	case left <= 0:
		ended := p.sandbox.Status.Phase == v1alpha1.PhaseExpired || p.sandbox.Status.Phase == v1alpha1.PhaseFailed
		return lifecycle.ExpireTimePassed, p.assignment != nil || !ended
	case left <= p.Timing.ExpirationThreshold:
		p.after(left)
	default:
		p.after(left - p.Timing.ExpirationThreshold)
	}
	return 0, false
}

// expiring tells, also to a process that comes later, that the container was told to end because its time was over.
func (p *pass) expiring() bool { return p.base.Status.Reason == reasonExpiring }

func (p *pass) resetRequested() bool {
	want, have := p.sandbox.Spec.ResetRevision, p.sandbox.Status.AcceptedResetRevision
	return want != nil && (have == nil || want.After(have.Time))
}

func (p *pass) observeUnassigned() (lifecycle.Event, bool, error) {
	st := &p.sandbox.Status
	switch {
	case p.refused:
		return lifecycle.AgentFailed, true, nil
	case st.Phase == "":
		return lifecycle.Accepted, true, nil
	case st.Phase == v1alpha1.PhaseFailed, st.Phase == v1alpha1.PhaseExpired, p.state().Finished:
		return 0, false, nil
	default:
		return lifecycle.Unassigned, true, nil
	}
}

// observeLost tells what to do about an agent that is lost. The condition keeps the moment since when it is, so that a
// restart of this process does not start the recovery timeout anew.
func (p *pass) observeLost() (lifecycle.Event, bool, error) {
	if p.sandbox.Status.Phase != v1alpha1.PhaseRunning && !p.fast() {
		// Nobody has been told that it runs, so that no policy is needed: elsewhere, once this agent cannot have it.
		p.ops.exclude(p.name, p.assignment.AgentUID, p.now.Add(6*p.Timing.Requeue))
		p.explain("AgentUnavailable", "agent "+p.assignment.AgentPod+" is lost")
		return lifecycle.AgentRefused, true, nil
	}
	c := meta.FindStatusCondition(p.sandbox.Status.Conditions, v1alpha1.ConditionAgentLost)
	if p.sandbox.Spec.FailurePolicy == v1alpha1.FailurePolicyAutoRecreate && c != nil && c.Status == "True" {
		timeout := 30 * time.Second
		if s := p.sandbox.Spec.RecoveryTimeoutSeconds; s != nil {
			timeout = time.Duration(*s) * time.Second
		}
		left := timeout - p.now.Sub(c.LastTransitionTime.Time)
		if left <= 0 {
			return lifecycle.RecoveryTimeoutOver, true, nil
		}
		p.after(left)
	}
	p.after(p.Timing.Requeue)
	return lifecycle.AgentLost, true, nil
}

// observeAgent reads the agent's report, or does without where there is none (yet).
func (p *pass) observeAgent(ctx context.Context) (lifecycle.Event, bool, error) {
	report := p.Index.Report(p.fence())
	create, asked := p.ops.look(p.name, p.key(opCreate))
	// After a create that succeeded, what is over is an earlier try that the same fence was used for.
	known := report != nil && report.GetState() != agentv1.SandboxState_SANDBOX_STATE_CREATING && !over(report)
	switch {
	case asked && create.running && report.GetState() != agentv1.SandboxState_SANDBOX_STATE_RUNNING, asked && create.err != nil:
		return p.observeCreate(create) // it knows more of the why than the report
	case asked && !known && create.report != nil && p.now.Sub(create.ended) < p.Timing.Requeue:
		p.after(p.Timing.Requeue)
		return p.observeReport(create.report) // the agent's answer has overtaken its stream
	case asked && !create.running:
		p.ops.drop(p.name, p.key(opCreate))
	}
	switch {
	case over(report) && p.sandbox.Status.Phase == v1alpha1.PhaseRunning: // or so for an earlier try, and the Registry is late
		return p.observeMissing(ctx)
	case report != nil:
		return p.observeReport(report)
	case p.wanted():
		return lifecycle.Scheduled, true, nil
	}
	return p.observeMissing(ctx)
}

// wanted tells that the sandbox has never been seen to run, and is this controller's to create.
func (p *pass) wanted() bool {
	return p.sandbox.Status.Phase != v1alpha1.PhaseRunning && p.sandbox.Status.Phase != v1alpha1.PhaseFailed && !p.fast()
}

// over tells that a report is the last but one, or the last, of its container.
func over(r *agentv1.SandboxReport) bool {
	s := r.GetState()
	return s == agentv1.SandboxState_SANDBOX_STATE_FAILED || s == agentv1.SandboxState_SANDBOX_STATE_TERMINATED
}

func (p *pass) observeReport(r *agentv1.SandboxReport) (lifecycle.Event, bool, error) {
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_CREATING:
		p.after(p.Timing.Requeue)
		p.explain("Creating", "")
		return lifecycle.AgentCreating, p.sandbox.Status.Phase != v1alpha1.PhaseRunning, nil
	case agentv1.SandboxState_SANDBOX_STATE_RUNNING:
		p.record(r)
		p.ops.succeeded(p.name)
		return lifecycle.AgentRunning, p.sandbox.Status.Phase != v1alpha1.PhaseFailed, nil
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED:
		p.record(r)
		if r.ExitCode != nil && r.GetExitCode() == 0 {
			return lifecycle.AgentCompleted, true, nil
		}
		return lifecycle.AgentCrashed, true, nil
	case agentv1.SandboxState_SANDBOX_STATE_FAILED:
		return p.observeFailed(r)
	case agentv1.SandboxState_SANDBOX_STATE_TERMINATED:
		if p.wanted() { // somebody's create failed or was taken back, and left nothing
			return lifecycle.Scheduled, true, nil
		}
		p.explain("ContainerGone", "the agent says that the container is gone, and nobody asked this controller for that")
		return lifecycle.AgentTerminated, true, nil
	default: // terminating: somebody else deletes it, and the next report tells
		p.after(p.Timing.Requeue)
		return 0, false, nil
	}
}

// observeFailed is about a create that failed and that this process has no answer to: another one asked for it, which died
// or was deposed, and whose leaving may be all that was wrong. It is judged as one of this process's own.
func (p *pass) observeFailed(r *agentv1.SandboxReport) (lifecycle.Event, bool, error) {
	reason := cmp.Or(fault.Reason(r.GetReason()), fault.Internal)
	if p.wanted() && !requestAtFault(reason) {
		return p.observeCreate(p.ops.learn(p.name, p.key(opCreate), fault.New(errdefs.ErrUnavailable, reason, "%s", r.GetMessage())))
	}
	p.explain(camel(reason), r.GetMessage())
	return lifecycle.AgentFailed, true, nil
}

// observeCreate reads how a create that was asked for has gone.
func (p *pass) observeCreate(o outcome) (lifecycle.Event, bool, error) {
	p.after(p.Timing.Requeue)
	if o.running || o.err == nil {
		p.explainCreate(o)
		return lifecycle.AgentCreating, p.sandbox.Status.Phase != v1alpha1.PhaseRunning, nil
	}
	reason := fault.ReasonOf(o.err)
	p.explain(camel(reason), messageOf(o.err))
	switch {
	case errdefs.IsAlreadyExists(o.err): // by this very fence; it will be reported
		return 0, false, nil
	case reason == fault.LeaderSuperseded:
		return p.observeSuperseded(o)
	case requestAtFault(reason):
		return lifecycle.AgentFailed, true, nil
	case agentRefuses(reason):
		return p.refusedBy(o.err)
	}
	// Nobody's fault: again in a while, and after some tries elsewhere.
	why := trouble{camel(reason), fmt.Sprintf("agent %s could not create it, and is asked again: %s", p.assignment.AgentPod, messageOf(o.err))}
	p.ops.trouble(p.name, why)
	p.explain(why.reason, why.message)
	wait := p.Timing.Requeue
	if d, ok := fault.RetryAfter(o.err); ok {
		wait = min(d, wait)
	}
	if left := wait - p.now.Sub(o.ended); left > 0 {
		p.after(left)
		return 0, false, nil
	}
	if p.ops.failed(p.name) >= maxCreateFailures {
		return p.refusedBy(o.err)
	}
	p.ops.drop(p.name, p.key(opCreate))
	return lifecycle.Scheduled, true, nil
}

// observeSuperseded: the agent knows a later leader, or this process has led before under a Lease that counts anew. That
// says nothing of the sandbox or of the agent: whoever leads asks again, under a term that holds.
func (p *pass) observeSuperseded(o outcome) (lifecycle.Event, bool, error) {
	p.explainCreate(outcome{})
	wait := min(p.Timing.Requeue, time.Second)
	if left := wait - p.now.Sub(o.ended); left > 0 {
		p.after(left)
		return 0, false, nil
	}
	p.ops.drop(p.name, p.key(opCreate))
	return lifecycle.Scheduled, true, nil
}

// refusedBy has the agent passed over for a while.
func (p *pass) refusedBy(err error) (lifecycle.Event, bool, error) {
	if _, told := p.ops.look(p.name, p.key(opDelete)); !told {
		p.warn(camel(fault.ReasonOf(err)), "Create", fmt.Sprintf("agent %s refused it, another one is looked for: %s", p.assignment.AgentPod, messageOf(err)))
	}
	p.ops.exclude(p.name, p.assignment.AgentUID, p.now.Add(6*p.Timing.Requeue))
	return lifecycle.AgentRefused, true, nil
}

// observeMissing is about a sandbox that should be on its agent and is not in the Registry, or is over there. Only the agent's own word
// counts: the Registry may be late.
func (p *pass) observeMissing(ctx context.Context) (lifecycle.Event, bool, error) {
	if p.base.Status.Phase == "" { // the writing of the resource has overtaken the Registry's news
		p.after(p.Timing.Requeue)
		return lifecycle.AgentCreating, p.sandbox.Status.Phase != v1alpha1.PhaseRunning, nil
	}
	if !p.Index.Synced() {
		return 0, false, nil // everything is looked at again once it is
	}
	report, err := p.reportBy(ctx, p.Agents.Snapshot)
	if err == nil && report == nil {
		report, err = p.reportBy(ctx, p.Agents.Ask) // what it said a moment ago may be older than the container
	}
	if err != nil {
		p.after(p.Timing.Requeue)
		return 0, false, nil //nolint:nilerr // an agent that does not answer says nothing; observeLoss judges it
	}
	if report != nil {
		p.after(p.Timing.Requeue) // the answer may be of a moment ago, and the Registry has said all that it has to say
		return p.observeReport(report)
	}
	p.explain("ContainerGone", "the agent has no container of this sandbox")
	return lifecycle.AgentTerminated, true, nil
}

// reportBy is the agent's own report of the sandbox, asked for in one of two ways; nil if it has none.
func (p *pass) reportBy(ctx context.Context, ask func(context.Context, string, string) (*agentv1.AgentSnapshot, error)) (*agentv1.SandboxReport, error) {
	snapshot, err := ask(ctx, p.addressOf(p.fence()), p.assignment.AgentUID)
	if err != nil {
		return nil, err
	}
	for _, r := range snapshot.GetSandboxes() {
		f := r.GetRecord().GetFence()
		if f.GetSandboxUid() == p.assignment.SandboxUID && f.GetAttempt() == p.assignment.Attempt {
			return r, nil
		}
	}
	return nil, nil
}

// fast tells that the assignment in force was made on the fast path: its container exists already.
func (p *pass) fast() bool {
	if p.sandbox.Annotations[v1alpha1.AnnotationSandboxUID] == "" || p.base.Status.Attempt > 0 && p.base.Status.Attempt < p.assignment.Attempt {
		return false
	}
	c := meta.FindStatusCondition(p.sandbox.Status.Conditions, v1alpha1.ConditionScheduled)
	return c == nil || c.Reason == reasonFastPath
}

// requestAtFault tells that no agent will ever do what was asked.
func requestAtFault(r fault.Reason) bool {
	switch r { //nolint:exhaustive // a list of some
	case fault.ImageNotFound, fault.ImageInvalid, fault.CommandNotFound, fault.CommandNotExecutable, fault.UserNotFound, fault.WorkingDirInvalid,
		fault.InvalidField:
		return true
	}
	return false
}

// agentRefuses tells that another agent may do what this one does not.
func agentRefuses(r fault.Reason) bool {
	switch r { //nolint:exhaustive // a list of some
	case fault.NoCapacity, fault.PortConflict, fault.FenceMismatch, fault.Overloaded, fault.SandboxTerminating, fault.RuntimeUnavailable,
		fault.AgentDraining:
		return true
	}
	return false
}
