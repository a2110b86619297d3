//go:build integration

package inside_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/single"
)

// TestImagesAreRefused makes sandboxes of hostile images, in hostile directories and with huge arguments on one agent.
func TestImagesAreRefused(t *testing.T) {
	s := single.Start(t, containerd.Start(t))
	s.Program = buildHostile(t)
	canary, err := mesh.NewCanary(mesh.CanaryParent)
	require.NoError(t, err)
	defer canary.Remove()
	s.Env = attack.Env{Canary: canary.Path, Secret: canary.Secret}
	for _, i := range inside.Images(s.Program) {
		require.NoError(t, i.Import(t.Context(), s.Node))
	}
	require.NoError(t, inside.HostileImages(t.Context(), s, canary))
	require.NoError(t, inside.WorkingDirs(t.Context(), s))
	require.NoError(t, inside.Arguments(t.Context(), s))
	report := s.Log.Report()
	require.Greater(t, report.Refused, 30)
	for _, f := range report.Failures {
		t.Errorf("%s (%s): %s", f.Name, f.Where, f.What)
	}
}

func buildHostile(t *testing.T) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hostile")
	out, err := exec.CommandContext(t.Context(), "env", "CGO_ENABLED=0", "go", "build", "-o", path, "../../hostile").CombinedOutput()
	require.NoError(t, err, "%s", out)
	program, err := os.ReadFile(path)
	require.NoError(t, err)
	return program
}
