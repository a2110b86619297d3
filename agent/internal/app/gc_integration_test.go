//go:build integration

package app_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestCreatesDuringGarbageCollection creates sandboxes concurrently while containerd's garbage collector runs without pause:
// every part of an incomplete create is referenced at every moment, or created again.
func TestCreatesDuringGarbageCollection(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	ctx, stop := context.WithCancel(t.Context())
	var collector, workers sync.WaitGroup
	collected := 0
	collector.Go(func() {
		manager := s.Client.LeasesService()
		for ctx.Err() == nil {
			lease, err := manager.Create(ctx, leases.WithRandomID(), leases.WithExpiration(time.Minute))
			if err == nil {
				err = manager.Delete(ctx, lease, leases.SynchronousDelete)
			}
			if err == nil {
				collected++
			}
		}
	})
	const width, each = 6, 12
	for worker := range width {
		workers.Go(func() {
			for i := range each {
				r := record(fmt.Sprintf("gc-%d-%d", worker, i), sh("sleep 1000"))
				if _, err := a.create(t.Context(), r); err != nil {
					t.Errorf("creating %s: %v", r.GetName(), err)
				}
				if _, err := a.tryDelete(t.Context(), r.GetFence(), 0); err != nil {
					t.Errorf("deleting %s: %v", r.GetName(), err)
				}
			}
		})
	}
	workers.Wait()
	stop()
	collector.Wait()
	require.Greater(t, collected, each, "the collector ran all the time")
	s.CheckClean(t)
}
