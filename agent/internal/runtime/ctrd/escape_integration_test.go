//go:build integration

package ctrd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// notClosed are the attacks of the suite that succeed until sandboxes have ids of their own.
var notClosed = []string{"namespaces: ids of the node"}

// TestAttacksAreRefused runs the program of the attack suite in a container of each kind.
func TestAttacksAreRefused(t *testing.T) {
	s := containerd.Start(t)
	program := filepath.Join(t.TempDir(), "hostile")
	out, err := exec.CommandContext(t.Context(), "env", "CGO_ENABLED=0", "go", "build", "-o", program, "../../../../tests/e2e/escape/hostile").CombinedOutput()
	require.NoError(t, err, "%s", out)
	raw, err := os.ReadFile(program)
	require.NoError(t, err)
	options := []containerd.Option{
		containerd.WithFile("/hostile", string(raw), 0o755), containerd.WithFile("/setuid", string(raw), 0o4755), containerd.WithFile("/filecaps", string(raw), 0o755),
	}
	s.Import(t, "docker.io/library/root:test", containerd.Image(t, options...))
	s.Import(t, "docker.io/library/user:test", containerd.Image(t, append(options, containerd.WithUser("1000:1000"))...))
	canary := filepath.Join(t.TempDir(), "canary")
	secret := uuid.NewString()
	require.NoError(t, os.WriteFile(canary, []byte(secret), 0o644))
	env, err := json.Marshal(map[string]string{"Canary": canary, "Secret": secret})
	require.NoError(t, err)
	r := withSlots(t, s)
	for _, image := range []string{"root:test", "user:test"} {
		for _, slot := range []bool{true, false} {
			t.Run(map[bool]string{true: "slot ", false: "cold "}[slot]+image, func(t *testing.T) {
				b := box(t, s, slot, image, "/hostile", "run")
				b.Env = map[string]string{"ESCAPE": string(env)}
				require.NoError(t, launch(t.Context(), r, b))
				defer func() { require.NoError(t, r.Delete(t.Context(), b.ID)) }()
				ctx, cancel := context.WithTimeout(t.Context(), 2*testkit.Timeout)
				defer cancel()
				_, err := r.Wait(ctx, b.ID)
				require.NoError(t, err)
				attackOutput(t, b.LogPath)
			})
		}
	}
}

// attackOutput checks the lines of the program.
func attackOutput(t *testing.T, path string) {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	refused := 0
	for line := range bytes.Lines(raw) {
		var o struct{ Name, Evidence, Refused, Broken string }
		require.NoError(t, json.Unmarshal(line, &o), "%s", line)
		switch {
		case slices.Contains(notClosed, o.Name), strings.HasPrefix(o.Name, "ports: "), strings.HasPrefix(o.Name, "sockets: abstract"):
		case o.Evidence != "":
			t.Errorf("%s: %s", o.Name, o.Evidence)
		case o.Broken != "":
			t.Errorf("%s could not be made: %s", o.Name, o.Broken)
		default:
			t.Logf("%s: %s", o.Name, o.Refused)
			refused++
		}
	}
	require.Greater(t, refused, 50)
}
