//go:build integration

package ctrd_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

func newRuntime(t *testing.T, s *containerd.Server, change func(*ctrd.Config)) *ctrd.Runtime {
	t.Helper()
	handler, err := shared.ParseHandler("runc")
	require.NoError(t, err)
	cfg := ctrd.Config{Client: s.Client, Handler: handler, LogRoot: s.LogRoot, CgroupParent: s.CgroupParent, NetNSPath: "/proc/self/ns/net"}
	if change != nil {
		change(&cfg)
	}
	r := ctrd.New(cfg)
	t.Cleanup(r.Close)
	return r
}

func TestConformance(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/nouser:test", containerd.Image(t, containerd.WithUser("nobodyknows")))
	registry := containerd.NewRegistry(t, "", "", nil)
	broken := registry.Push(t, "broken:1", containerd.Broken(t))
	gone := containerd.NewRegistry(t, "", "", nil)
	gone.Close()
	conformance.Run(t, func(t *testing.T) conformance.Setup {
		return conformance.Setup{
			Runtime: newRuntime(t, s, nil), Image: "busybox:test", MissingImage: registry.Host + "/nope:1", AwayImage: gone.Host + "/nope:1",
			UnknownUserImage: "nouser:test", BrokenImage: broken, LogRoot: s.LogRoot,
		}
	})
}
