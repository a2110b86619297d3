package agentconformance

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// recordsOfOthersAreRefused: an agent runs sandboxes of its own namespace and pool alone, and keeps tombstones of its own namespace.
func recordsOfOthersAreRefused(t *testing.T, a *Agent) {
	for name, forge := range map[string]func(*agentv1.SandboxRecord){
		"another namespace": func(r *agentv1.SandboxRecord) { r.Namespace = "victim" },
		"another pool":      func(r *agentv1.SandboxRecord) { r.Spec.Pool = "victim" },
	} {
		record := a.record("u", 1)
		forge(record)
		_, err := a.create(t.Context(), record)
		require.Equal(t, fault.PermissionDenied, fault.ReasonOf(err), "%s: %v", name, err)
	}
	own := a.record("u", 1)
	a.mustCreate(t, own)
	_, err := receive(a.Client.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{
		Fence: own.GetFence(), Tombstone: &agentv1.Tombstone{Fence: own.GetFence(), Namespace: "victim", Name: own.GetName()},
	}))
	require.Equal(t, fault.PermissionDenied, fault.ReasonOf(err), "%v", err)
}
