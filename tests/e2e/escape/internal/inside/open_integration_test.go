//go:build integration

package inside_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/suite"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestEveryAttackCanSucceed runs all attacks where nothing prevents them: each that does not succeed there has a reason.
func TestEveryAttackCanSucceed(t *testing.T) {
	s := containerd.Start(t)
	program := buildHostile(t)
	canary, err := mesh.NewCanary(mesh.CanaryParent)
	require.NoError(t, err)
	defer canary.Remove()
	log := &suite.Log{}
	require.NoError(t, inside.Open{
		Socket: s.Socket, CgroupParent: s.CgroupParent, Images: inside.Images(program), CanaryDir: canary.Dir,
		Env: attack.Env{Canary: canary.Path, Secret: canary.Secret},
	}.Prove(t.Context(), log))
	report := log.Report()
	t.Logf("%d attacks; not proved: %v", len(attack.All()), report.Unproven)
	require.Empty(t, report.Failures)
	touched, err := canary.Touched()
	require.NoError(t, err)
	require.Empty(t, touched)
}
