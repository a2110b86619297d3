//go:build integration

package ctrd_test

import (
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// own makes a configuration that of our own shim.
func own(t *testing.T, s *containerd.Server) func(*ctrd.Config) {
	t.Helper()
	dir := t.TempDir()
	for name, pkg := range map[string]string{"shim": "../../../cmd/containerd-shim-fsb-v1", "init": "../../../cmd/sandbox-init"} {
		out, err := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), pkg).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	handler, err := shared.ParseHandler("fsb")
	require.NoError(t, err)
	return func(c *ctrd.Config) {
		c.Handler, c.Shim, c.SandboxInit, c.SlotRoot = handler, filepath.Join(dir, "shim"), filepath.Join(dir, "init"), filepath.Join(s.Dir, "slots")
	}
}

func TestOwnConformance(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	change := own(t, s)
	conformance.Run(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: newRuntime(t, s, change), Image: "busybox:test", MissingImage: registry.Host + "/nope:1", AwayImage: gone.Host + "/nope:1",
			UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot,
		}
	})
}

func TestOwnSlotConformance(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/other:test", containerd.Image(t, containerd.WithFile("/other", "x", 0o644)))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	change := own(t, s)
	conformance.RunSlots(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: newRuntime(t, s, change), Image: "busybox:test", OtherImage: "other:test", MissingImage: registry.Host + "/nope:1",
			AwayImage: gone.Host + "/nope:1", UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot,
		}
	})
}
