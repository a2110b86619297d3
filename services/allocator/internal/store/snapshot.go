package store

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// snapshot is all that is known about one name at one moment. It is cheap to take, and what it points to is immutable: the API's
// view is built from it on request, without the store's lock. Without a resource and without a record the name is not visible.
type snapshot struct {
	key      Key
	codec    codec
	resource *packed
	record   *Record
	reports  reports
	deleting time.Time // when a deletion was accepted; zero if none was
}

func (n *snapshot) seen() bool { return n.resource != nil || n.record != nil }

// outlines returns 1 if the resource is an outline, and 0 otherwise.
func (n *snapshot) outlines() int {
	if n.resource != nil && n.resource.outline {
		return 1
	}
	return 0
}

func (n *snapshot) uid() string {
	if n.resource != nil {
		return n.resource.uid
	}
	return n.recorded().GetFence().GetSandboxUid()
}

// recorded returns the record that the agent received; nil, which all getters accept, without one.
func (n *snapshot) recorded() *agentv1.SandboxRecord {
	if n.record == nil {
		return nil
	}
	return n.record.Record
}

func (n *snapshot) requestID() string {
	if n.resource != nil {
		return n.resource.requestID
	}
	return n.recorded().GetRequestId()
}

func (n *snapshot) pool() string {
	if n.resource != nil {
		return n.resource.pool
	}
	return n.recorded().GetSpec().GetPool()
}

func (n *snapshot) labels() map[string]string {
	if n.resource != nil {
		return n.codec.unpack(n.resource).Labels
	}
	return n.recorded().GetLabels()
}

// fence returns the container of the assignment in force; zero without one.
func (n *snapshot) fence() identity.Fence {
	if n.resource != nil {
		return n.resource.assigned
	}
	return identity.FenceOf(n.recorded().GetFence())
}

// assignment returns the assignment in force, or nil. resource is the custom resource, if there is one.
func (n *snapshot) assignment(resource *v1alpha1.Sandbox) *v1alpha1.Assignment {
	if resource == nil {
		f := n.recorded().GetFence()
		return &v1alpha1.Assignment{
			AgentPod: n.record.AgentPod, NodeName: n.record.NodeName, SandboxUID: f.GetSandboxUid(), Attempt: f.GetAttempt(), AgentUID: f.GetAgentUid(),
			Superseded: convert.SupersededFromProto(n.recorded().GetSuperseded()),
		}
	}
	if a, err := resource.Assignment(); err == nil {
		return a
	}
	return nil
}

// latest returns the newest report on the container of the assignment in force. The answer to its create, which the record holds, comes by
// another stream than the agent's status and is newer than a status of CREATING.
func (n *snapshot) latest() *agentv1.SandboxReport {
	key := n.fence()
	if key == (identity.Fence{}) {
		return nil
	}
	report := n.reports.get(key)
	if n.record == nil || identity.FenceOf(n.recorded().GetFence()) != key {
		return report
	}
	if report == nil || report.GetState() == agentv1.SandboxState_SANDBOX_STATE_CREATING {
		return n.record.Report
	}
	return report
}

func fenceOf(a *v1alpha1.Assignment) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: a.SandboxUID, Attempt: a.Attempt, AgentUid: a.AgentUID}
}

// phase returns the sandbox's phase.
func (n *snapshot) phase() sandboxv1.Phase {
	if !n.deleting.IsZero() || n.resource != nil && n.resource.deleting {
		return sandboxv1.Phase_PHASE_TERMINATING
	}
	p, _ := moved(n.written(), n.latest())
	return p
}

// written returns the phase without the agents' reports.
func (n *snapshot) written() sandboxv1.Phase {
	if n.resource != nil {
		return convert.PhaseToProto(n.resource.phase)
	}
	if n.record != nil && n.record.Failure != nil {
		return sandboxv1.Phase_PHASE_FAILED
	}
	return sandboxv1.Phase_PHASE_BOUND
}

// item builds the view of a visible sandbox.
func (n *snapshot) item() Item {
	item := Item{Key: n.key, RequestID: n.requestID()}
	if n.resource != nil {
		item.Resource, item.Outline = n.codec.unpack(n.resource), n.resource.outline
		item.Sandbox = convert.ToProto(item.Resource)
	} else {
		r := n.recorded()
		item.Sandbox = &sandboxv1.Sandbox{
			Namespace: r.GetNamespace(), Name: r.GetName(), Uid: r.GetFence().GetSandboxUid(), Labels: maps.Clone(r.GetLabels()),
			Spec: proto.CloneOf(r.GetSpec()), CreateTime: r.GetCreateTime(), Status: &sandboxv1.SandboxStatus{Phase: n.written()},
		}
	}
	st := item.Sandbox.GetStatus()
	if a := n.assignment(item.Resource); a != nil {
		item.Fence, item.Superseded = fenceOf(a), convert.SupersededToProto(a.Superseded)
		setAssigned(st, a)
		overlay(st, n.latest())
	}
	if n.resource == nil && n.record.Failure != nil {
		st.Reason, st.Message = n.record.Failure.Reason, n.record.Failure.Message
	}
	if !n.deleting.IsZero() && item.Sandbox.GetDeleteTime() == nil { // the custom resource may not show it yet
		item.Sandbox.DeleteTime = timestamppb.New(n.deleting)
	}
	if item.Sandbox.GetDeleteTime() != nil {
		st.Phase = sandboxv1.Phase_PHASE_TERMINATING
	}
	return item
}

func setAssigned(st *sandboxv1.SandboxStatus, a *v1alpha1.Assignment) {
	if st.GetAssignedPod() == "" {
		st.AssignedPod = a.AgentPod
	}
	if st.GetNodeName() == "" {
		st.NodeName = a.NodeName
	}
	if st.GetAttempt() == 0 {
		st.Attempt = a.Attempt
	}
}

// moved returns the phase to which an agent's report moves a phase that may not reflect it yet, and whether the rest of the
// report applies, too. Phases only advance: a deleted, expired or failed sandbox keeps its phase.
func moved(p sandboxv1.Phase, r *agentv1.SandboxReport) (to sandboxv1.Phase, news bool) {
	switch p {
	case sandboxv1.Phase_PHASE_UNSPECIFIED, sandboxv1.Phase_PHASE_PENDING, sandboxv1.Phase_PHASE_BOUND, sandboxv1.Phase_PHASE_RUNNING:
	default:
		return p, false
	}
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_CREATING:
		if p != sandboxv1.Phase_PHASE_RUNNING {
			p = sandboxv1.Phase_PHASE_BOUND
		}
		return p, false
	case agentv1.SandboxState_SANDBOX_STATE_RUNNING:
		return sandboxv1.Phase_PHASE_RUNNING, true
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED:
		// Seed 002: exit code 0 leaves the phase at Running (with the condition Finished), any other code fails it.
		if r.GetExitCode() != 0 {
			return sandboxv1.Phase_PHASE_FAILED, true
		}
		return sandboxv1.Phase_PHASE_RUNNING, true
	default: // a failed create may be repeated: the controller decides whether the sandbox has failed
		return p, false
	}
}

// overlay applies an agent's report to a status.
func overlay(st *sandboxv1.SandboxStatus, r *agentv1.SandboxReport) {
	to, news := moved(st.GetPhase(), r)
	st.Phase = to
	if !news {
		return
	}
	if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
		setEnd(st, r)
	}
	st.SandboxId = r.GetContainerId()
	st.Endpoints = slices.Clone(r.GetEndpoints())
	if r.GetStartTime() != nil {
		st.StartTime = r.GetStartTime()
	}
	if r.GetStartPath() != sandboxv1.StartPath_START_PATH_UNSPECIFIED {
		st.StartPath = r.GetStartPath()
	}
}

func setEnd(st *sandboxv1.SandboxStatus, r *agentv1.SandboxReport) {
	if r.ExitCode != nil {
		st.ExitCode = proto.Int32(r.GetExitCode())
	}
	st.Reason, st.Message, st.FinishTime = r.GetReason(), r.GetMessage(), r.GetFinishTime()
}
