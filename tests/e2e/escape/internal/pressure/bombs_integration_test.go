//go:build integration

package pressure

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/single"
)

// TestBombsAreBounded starts every bomb on one agent and waits until it is measured. The neighbor is another test's.
func TestBombsAreBounded(t *testing.T) {
	s := single.Start(t, containerd.Start(t), "--sandbox-disk-bytes="+strconv.Itoa(DiskBytes), "--sandbox-disk-inodes="+strconv.Itoa(DiskInodes))
	path := filepath.Join(t.TempDir(), "hostile")
	out, err := exec.CommandContext(t.Context(), "env", "CGO_ENABLED=0", "go", "build", "-o", path, "../../hostile").CombinedOutput()
	require.NoError(t, err, "%s", out)
	s.Program, err = os.ReadFile(path)
	require.NoError(t, err)
	for _, i := range inside.Images(s.Program) {
		require.NoError(t, i.Import(t.Context(), s.Node))
	}
	for _, b := range bombs() {
		if b.bounded == nil || b.load == "log" { // its log is where agents of a cluster have it
			continue
		}
		t.Run(b.load, func(t *testing.T) {
			r, err := start(t.Context(), s, bombSeconds, b.load)
			defer func() { require.NoError(t, finish(t.Context(), s)) }()
			require.NoError(t, err)
			grown := func() bool { return r.most() > 0 }
			require.Eventually(t, grown, stormTime, calmTime/100)
			evidence, refused := b.bounded(t.Context(), s, r)
			require.Empty(t, evidence)
			t.Log(refused)
		})
	}
}
