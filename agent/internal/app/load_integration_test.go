//go:build integration

package app_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/containerd"
)

// TestDeletesUnderLoad deletes many sandboxes while all processors are busy, each as soon as it runs and has begun to write, so
// that the first check of its log and its removal race; some end by themselves meanwhile. Each delete succeeds at the first
// attempt: slow is not an error.
func TestDeletesUnderLoad(t *testing.T) {
	s := containerd.Start(t)
	s.Import(t, containerd.Busybox, containerd.Image(t))
	a := startAgent(t, s, nil)
	ctx, stop := context.WithCancel(t.Context())
	var burners, workers sync.WaitGroup
	for range 4 {
		burners.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
			}
		})
	}
	defer burners.Wait()
	defer stop()
	const width, each = 8, 10
	for worker := range width {
		workers.Go(func() {
			for i := range each {
				script := "echo out; sleep 1000"
				if i%3 == 0 {
					script = "sleep 0.$(($RANDOM % 3)); echo out; exit 3"
				}
				r := record(fmt.Sprintf("load-%d-%d", worker, i), sh(script))
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
	require.Empty(t, a.snapshot(t).GetSandboxes())
	s.CheckClean(t)
}
