//go:build integration

package app_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestPinnedImages has an agent pull images ahead from a real registry, keep them over a restart, and drop one.
func TestPinnedImages(t *testing.T) {
	s := containerd.Start(t)
	registry := containerd.NewRegistry(t, "", "", nil)
	first := registry.Push(t, "team/first:1", containerd.Image(t))
	second := registry.Push(t, "team/second:1", containerd.Image(t, containerd.WithFile("/second", "x", 0o644)))
	missing := registry.Host + "/team/missing:1"

	const (
		ready  = agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY
		failed = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED
	)
	requireImages := func(a *agent, want map[string]agentv1.PinnedImageState) {
		t.Helper()
		require.Eventually(t, func() bool {
			got := a.snapshot(t).GetPinnedImages()
			for _, i := range got {
				if want[i.GetImage()] != i.GetState() {
					return false
				}
			}
			return len(got) == len(want)
		}, testkit.Timeout, testkit.Tick)
	}
	requirePinned := func(image string, want bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			img, err := s.Client.ImageService().Get(t.Context(), image)
			return err == nil && (img.Labels["io.cri-containerd.pinned"] == "pinned") == want
		}, testkit.Timeout, testkit.Tick)
	}
	set := func(a *agent, images ...string) {
		t.Helper()
		_, err := a.SetPinnedImages(t.Context(), &agentv1.SetPinnedImagesRequest{AgentUid: podUID, Images: images})
		require.NoError(t, err)
	}

	a := startAgent(t, s, nil)
	set(a, first, second, missing)
	requireImages(a, map[string]agentv1.PinnedImageState{first: ready, second: ready, missing: failed})
	requirePinned(first, true)
	// The agent learns of new images beside the pulls.
	require.Eventually(t, func() bool { return slices.Contains(a.snapshot(t).GetImages(), first) }, testkit.Timeout, testkit.Tick)
	a.stop()

	a = startAgent(t, s, nil)
	requireImages(a, map[string]agentv1.PinnedImageState{first: ready, second: ready, missing: failed})
	set(a, second)
	requireImages(a, map[string]agentv1.PinnedImageState{second: ready})
	requirePinned(first, false)
	requirePinned(second, true)
}
