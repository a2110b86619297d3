//go:build integration

package ctrd_test

import (
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/conformance"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
	shared "github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
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

// TestListIncludesWritesOfAKilledAgent closes the connection of an agent while containerd has its writes queued. It completes them;
// the next agent's first list has them all.
func TestListIncludesWritesOfAKilledAgent(t *testing.T) {
	s := containerd.Start(t)
	const n = 40
	killed, err := shared.Dial(s.Socket, shared.DefaultNamespace)
	require.NoError(t, err)
	created := make(chan struct{}, n)
	var wg sync.WaitGroup
	for range n {
		wg.Go(func() {
			_, err := killed.ContainerService().Create(t.Context(), containers.Container{
				ID: uuid.NewString() + "-1", Labels: map[string]string{identity.KeyManaged: "true"}, Runtime: containers.RuntimeInfo{Name: "io.containerd.runc.v2"},
				Spec: &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte("{}")},
			})
			if err == nil {
				created <- struct{}{}
			}
		})
	}
	for range 5 { // the others wait for each other's writes
		<-created
	}
	require.NoError(t, killed.Close())
	next := newRuntime(t, s, nil)
	first, err := next.List(t.Context(), map[string]string{identity.KeyManaged: "true"})
	require.NoError(t, err)
	wg.Wait()
	for range n { // more writes than were queued
		require.True(t, errdefs.IsNotFound(s.Client.ContainerService().Delete(t.Context(), "none")))
	}
	last, err := next.List(t.Context(), map[string]string{identity.KeyManaged: "true"})
	require.NoError(t, err)
	require.Len(t, first, len(last))
	for _, f := range last {
		require.NoError(t, next.Delete(t.Context(), f.ID))
	}
}
