package conformance

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// keepAlive: a container without a process of its own runs until a signal or a delete ends it.
func keepAlive(t *testing.T, s *suite) {
	start := func() (runtime.Container, error) {
		c := s.container(t)
		c.KeepAlive = true
		return c, s.launch(c)
	}
	c, err := start()
	if !s.KeepsAlive {
		require.ErrorIs(t, err, errdefs.ErrInvalidArgument)
		require.Equal(t, fault.InvalidField, fault.ReasonOf(err))
		require.ErrorContains(t, err, "keep_alive")
		require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
		require.Nil(t, s.found(t, c.ID))
		return
	}
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(s.ctx, 200*time.Millisecond)
	defer cancel()
	_, err = s.Runtime.Wait(ctx, c.ID)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.True(t, s.Runtime.HandlesSignal(s.ctx, c.ID, syscall.SIGTERM))
	require.NoError(t, s.Runtime.Signal(s.ctx, c.ID, syscall.SIGTERM, false))
	exit, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	require.Equal(t, int32(128+syscall.SIGTERM), exit.Code)

	c, err = start()
	require.NoError(t, err)
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.Nil(t, s.found(t, c.ID))
}
