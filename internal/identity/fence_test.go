package identity_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

func TestFenceOf(t *testing.T) {
	message := &agentv1.Fence{SandboxUid: "u", Attempt: 2, AgentUid: "a"}
	want := identity.Fence{SandboxUID: "u", Attempt: 2, AgentUID: "a"}
	require.Equal(t, want, identity.FenceOf(message))
	require.Equal(t, identity.Fence{}, identity.FenceOf((*agentv1.Fence)(nil)))
	require.Equal(t, want, identity.Identity{SandboxUID: "u", Attempt: 2, AgentUID: "a", State: identity.StateClaimed}.Fence())
}

func TestFenceComparesEveryPart(t *testing.T) {
	fence := identity.Fence{SandboxUID: "u", Attempt: 2, AgentUID: "a"}
	for name, other := range map[string]identity.Fence{
		"sandbox": {SandboxUID: "v", Attempt: 2, AgentUID: "a"},
		"attempt": {SandboxUID: "u", Attempt: 3, AgentUID: "a"},
		"agent":   {SandboxUID: "u", Attempt: 2, AgentUID: "b"},
	} {
		t.Run(name, func(t *testing.T) { require.NotEqual(t, fence, other) })
	}
}

func TestFenceFormats(t *testing.T) {
	fence := identity.Fence{SandboxUID: "u", Attempt: 2, AgentUID: "a"}
	require.Equal(t, "u-2", fence.ContainerID())
	require.Equal(t, "u-2@a", fence.String())
}
