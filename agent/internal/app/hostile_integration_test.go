//go:build integration

package app_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/app"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestHostileImagesTakeNoCapacity creates as many sandboxes as the agent has capacity, several times, from an image whose
// /etc/passwd is a FIFO. Each create used to hang, and to hold its capacity unit until the agent was restarted.
func TestHostileImagesTakeNoCapacity(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	s.Import(t, "docker.io/library/hostile:test", containerd.Image(t, containerd.WithFIFO("/etc/passwd")))
	const capacity, creates = 6, 48
	a := startAgent(t, s, func(c *app.Config) { c.Capacity = capacity })
	hostile := func(s *sandboxv1.SandboxSpec) { s.Image = "hostile:test" }
	slots := make(chan struct{}, capacity)
	errs := make(chan error, creates)
	for i := range creates {
		slots <- struct{}{}
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := a.create(ctx, record(fmt.Sprintf("hostile-%d", i), hostile))
			errs <- err
			<-slots
		}()
	}
	for range creates {
		err := <-errs
		require.True(t, errdefs.IsFailedPrecondition(err), "%v", err)
		require.Equal(t, fault.ImageInvalid, fault.ReasonOf(err))
		require.ErrorContains(t, err, "image docker.io/library/hostile:test cannot be used: /etc/passwd is not a regular file")
	}
	require.Eventually(t, func() bool { return len(a.snapshot(t).GetSandboxes()) == 0 }, testkit.Timeout, testkit.Tick, "they are still listed")
	for i := range capacity {
		r := record(fmt.Sprintf("good-%d", i), nil)
		a.mustCreate(t, r)
		defer a.delete(t, r.GetFence(), 0)
	}
	_, err := a.create(t.Context(), record("more", nil))
	require.Equal(t, fault.NoCapacity, fault.ReasonOf(err))
}
