package sandbox_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// TestForeignRecordsAreRefused: an agent runs nothing of another namespace or pool, and keeps no tombstone of another namespace,
// whatever a Sandbox says that names it.
func TestForeignRecordsAreRefused(t *testing.T) {
	tests := map[string]func(*agentv1.SandboxRecord){
		"another namespace": func(r *agentv1.SandboxRecord) { r.Namespace = "victim" },
		"no namespace":      func(r *agentv1.SandboxRecord) { r.Namespace = "" },
		"another pool":      func(r *agentv1.SandboxRecord) { r.Spec.Pool = "victim" },
		"no pool":           func(r *agentv1.SandboxRecord) { r.Spec.Pool = "" },
	}
	for name, forge := range tests {
		t.Run(name, func(t *testing.T) {
			env := newEnv(t, nil)
			_, err := env.create(t.Context(), record("u", 1, forge))
			require.Equal(t, fault.PermissionDenied, fault.ReasonOf(err), "%v", err)
			env.mustCreate(t, record("u", 1))
		})
	}
	t.Run("tombstone of another namespace", func(t *testing.T) {
		env := newEnv(t, nil)
		env.mustCreate(t, record("u", 1))
		forged := tombstoneOf("u", 1)
		forged.Namespace = "victim"
		_, err := env.Delete(t.Context(), &agentv1.DeleteSandboxRequest{Fence: forged.GetFence(), Tombstone: forged}, func(agentv1.DeleteStage) {})
		require.Equal(t, fault.PermissionDenied, fault.ReasonOf(err), "%v", err)
		require.Empty(t, env.tombstones(t))
	})
}
