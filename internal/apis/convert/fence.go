package convert

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// FenceToProto returns the message of a fence; identity.FenceOf is its inverse.
func FenceToProto(f identity.Fence) *agentv1.Fence {
	return &agentv1.Fence{SandboxUid: f.SandboxUID, Attempt: f.Attempt, AgentUid: f.AgentUID}
}
