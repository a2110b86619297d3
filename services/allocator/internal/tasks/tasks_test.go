package tasks_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestRunWaitsForItsTasks(t *testing.T) {
	s := tasks.New()
	var early, late, never atomic.Bool
	s.Go(func(context.Context) { early.Store(true) })
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	started, release := make(chan struct{}), make(chan struct{})
	s.Go(func(ctx context.Context) {
		close(started)
		<-ctx.Done()
		<-release
		late.Store(true)
	})
	<-started
	cancel()
	require.Empty(t, ended, "a task still runs")
	close(release)
	require.NoError(t, <-ended)
	require.True(t, early.Load(), "what was given before Run is run by it")
	require.True(t, late.Load())
	s.Go(func(context.Context) { never.Store(true) })
	require.NoError(t, s.Run(ctx))
	require.False(t, never.Load(), "after the end nothing is begun")
}
