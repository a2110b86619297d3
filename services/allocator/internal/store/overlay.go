package store

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
)

// recordView is a sandbox that has no custom resource yet.
func (s *Store) recordView(e *entry, r *Record) *Item {
	record := r.Record
	sb := &sandboxv1.Sandbox{
		Namespace: record.GetNamespace(), Name: record.GetName(), Uid: record.GetFence().GetSandboxUid(),
		Labels: maps.Clone(record.GetLabels()), Spec: proto.CloneOf(record.GetSpec()), CreateTime: record.GetCreateTime(),
		Status: &sandboxv1.SandboxStatus{Phase: sandboxv1.Phase_PHASE_BOUND},
	}
	setAssigned(sb.GetStatus(), r.AgentPod, r.NodeName, record.GetFence().GetAttempt())
	overlay(sb.GetStatus(), e.latest(record.GetFence(), r))
	s.overlayDeletion(sb)
	return &Item{Key: e.key, Sandbox: sb, Fence: record.GetFence(), RequestID: record.GetRequestId()}
}

// latest is the newest word on the container of a fence. The answer to its create, which the record holds, comes by another
// stream than the agent's status and is newer than a status that still says CREATING.
func (e *entry) latest(fence *agentv1.Fence, r *Record) *agentv1.SandboxReport {
	report := e.reports.get(fleet.KeyOf(fence))
	if r == nil || fleet.KeyOf(r.Record.GetFence()) != fleet.KeyOf(fence) {
		return report
	}
	if report == nil || report.GetState() == agentv1.SandboxState_SANDBOX_STATE_CREATING {
		return r.Report
	}
	return report
}

func setAssigned(st *sandboxv1.SandboxStatus, pod, node string, attempt int64) {
	if st.GetAssignedPod() == "" {
		st.AssignedPod = pod
	}
	if st.GetNodeName() == "" {
		st.NodeName = node
	}
	if st.GetAttempt() == 0 {
		st.Attempt = attempt
	}
}

// overlay lays an agent's report over a status that may not have followed it yet. It only moves a status on: what is
// deleted, expired or failed stays that.
func overlay(st *sandboxv1.SandboxStatus, r *agentv1.SandboxReport) {
	switch st.GetPhase() {
	case sandboxv1.Phase_PHASE_UNSPECIFIED, sandboxv1.Phase_PHASE_PENDING, sandboxv1.Phase_PHASE_BOUND, sandboxv1.Phase_PHASE_RUNNING:
	default:
		return
	}
	switch r.GetState() {
	case agentv1.SandboxState_SANDBOX_STATE_CREATING:
		if st.GetPhase() != sandboxv1.Phase_PHASE_RUNNING {
			st.Phase = sandboxv1.Phase_PHASE_BOUND
		}
		return
	case agentv1.SandboxState_SANDBOX_STATE_RUNNING:
		st.Phase = sandboxv1.Phase_PHASE_RUNNING
	case agentv1.SandboxState_SANDBOX_STATE_STOPPED:
		// Seed 002: exit code 0 leaves the phase at Running (the condition Finished tells), any other fails it.
		st.Phase = sandboxv1.Phase_PHASE_RUNNING
		if r.GetExitCode() != 0 {
			st.Phase = sandboxv1.Phase_PHASE_FAILED
		}
		setEnd(st, r)
	default: // what could not be created may be tried again: whether it has failed is the controller's to say
		return
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

// overlayDeletion shows a deletion that was accepted and that the custom resource may not tell of yet.
func (s *Store) overlayDeletion(sb *sandboxv1.Sandbox) {
	if at, ok := s.deleting[sb.GetUid()]; ok && sb.GetDeleteTime() == nil {
		sb.DeleteTime = timestamppb.New(at)
	}
	if sb.GetDeleteTime() != nil {
		sb.Status.Phase = sandboxv1.Phase_PHASE_TERMINATING
	}
}
