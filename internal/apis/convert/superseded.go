package convert

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// SupersededFromProto returns the superseded attempts of an assignment.
func SupersededFromProto(list []*agentv1.SupersededAttempt) []v1alpha1.Superseded {
	var out []v1alpha1.Superseded
	for _, s := range list {
		f := s.GetFence()
		out = append(out, v1alpha1.Superseded{
			AgentPod: s.GetAgentPod(), AgentUID: f.GetAgentUid(), AgentAddress: s.GetAgentAddress(), SandboxUID: f.GetSandboxUid(), Attempt: f.GetAttempt(),
		})
	}
	return out
}

// SupersededToProto returns the superseded attempts of a record.
func SupersededToProto(list []v1alpha1.Superseded) []*agentv1.SupersededAttempt {
	var out []*agentv1.SupersededAttempt
	for _, s := range list {
		out = append(out, &agentv1.SupersededAttempt{
			Fence:    &agentv1.Fence{SandboxUid: s.SandboxUID, Attempt: s.Attempt, AgentUid: s.AgentUID},
			AgentPod: s.AgentPod, AgentAddress: s.AgentAddress,
		})
	}
	return out
}
