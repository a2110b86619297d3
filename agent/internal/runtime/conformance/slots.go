package conformance

import (
	"context"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

// RunSlots tests a runtime that has slots. The tests of running containers apply to claimed slots as well.
func RunSlots(t *testing.T, setup func(t *testing.T) Setup) {
	t.Helper()
	run(t, setup, true, append(processes(), []test{
		{"slots are supported", supported},
		{"an unclaimed slot has no sandbox", unclaimed},
		{"a claim's stages come in order", claimStages},
		{"a claim is incomplete until SlotClaimed", claiming},
		{"a slot is claimed once", claimedOnce},
		{"a slot that ended is lost", lostSlot},
		{"a warm slot takes any image", warm},
		{"a canceled claim runs nothing", canceledClaim},
	}...))
}

var slotLabels = map[string]string{"fast-sandbox.io/managed": "true", "fast-sandbox.io/state": "slot"}

// startSlot starts the slot for c.
func (s *suite) startSlot(t *testing.T, c runtime.Container) {
	t.Helper()
	require.NoError(t, s.slots.StartSlot(s.ctx, runtime.Slot{
		ID: c.ID, Labels: slotLabels, Group: c.ID, LogPath: c.LogPath, HostnamePath: c.HostnamePath,
	}))
}

func supported(t *testing.T, s *suite) { require.NoError(t, s.slots.Unsupported(s.ctx)) }

func unclaimed(t *testing.T, s *suite) {
	c := s.container(t)
	list, err := s.Runtime.List(s.ctx, slotLabels)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, c.ID, list[0].ID)
	require.Nil(t, list[0].Record)
	require.Equal(t, runtime.TaskRunning, list[0].Task)
	require.False(t, list[0].Claiming)
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.NoDirExists(t, filepath.Dir(c.LogPath))
	_, err = s.Runtime.Wait(s.ctx, c.ID)
	require.True(t, errdefs.IsNotFound(err), "%v", err)
}

func claimStages(t *testing.T, s *suite) {
	c := s.container(t, "sleep", "1000")
	var reached []runtime.Stage
	require.NoError(t, s.slots.Claim(s.ctx, c, func(st runtime.Stage) { reached = append(reached, st) }))
	require.Equal(t, []runtime.Stage{runtime.StageImage, runtime.StageSnapshot, runtime.StageContainer, runtime.StageClaim}, reached)
}

func claiming(t *testing.T, s *suite) {
	c := s.container(t, "sleep", "1000")
	require.NoError(t, s.slots.Claim(s.ctx, c, func(runtime.Stage) {}))
	require.True(t, s.found(t, c.ID).Claiming)
	for range 2 {
		require.NoError(t, s.slots.SlotClaimed(c.ID))
		f := s.found(t, c.ID)
		require.False(t, f.Claiming)
		require.Equal(t, runtime.TaskRunning, f.Task)
		require.Equal(t, c.Record.GetValue(), f.Record.GetValue())
		require.Equal(t, c.Labels, f.Labels)
	}
}

func claimedOnce(t *testing.T, s *suite) {
	c := s.start(t, "sleep", "1000")
	require.ErrorIs(t, s.launch(c), runtime.ErrSlotLost)
	require.Equal(t, runtime.TaskRunning, s.found(t, c.ID).Task)
	c.ID = "slot.unknown"
	require.ErrorIs(t, s.launch(c), runtime.ErrSlotLost)
}

func lostSlot(t *testing.T, s *suite) {
	c := s.container(t, "sleep", "1000")
	require.NoError(t, s.Runtime.Signal(s.ctx, c.ID, syscall.SIGKILL, true))
	_, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err)
	require.ErrorIs(t, s.launch(c), runtime.ErrSlotLost)
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
}

func warm(t *testing.T, s *suite) {
	for _, other := range []bool{false, true} {
		c := s.container(t, "sleep", "1000")
		image := s.Image
		if other {
			image = s.OtherImage
		}
		require.NoError(t, s.slots.WarmSlot(s.ctx, c.ID, image))
		require.NoError(t, s.launch(c))
		require.Equal(t, runtime.TaskRunning, s.found(t, c.ID).Task)
		require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	}
	c := s.container(t, "sleep", "1000")
	require.True(t, errdefs.IsNotFound(s.slots.WarmSlot(s.ctx, c.ID, s.MissingImage)))
	require.NoError(t, s.launch(c), "a slot that could not be warmed can be claimed")
}

func canceledClaim(t *testing.T, s *suite) {
	c := s.container(t, "sleep", "1000")
	ctx, cancel := context.WithCancel(s.ctx)
	err := s.slots.Claim(ctx, c, func(st runtime.Stage) {
		if st == runtime.StageClaim {
			cancel()
		}
	})
	require.ErrorIs(t, err, context.Canceled)
	exit, err := s.Runtime.Wait(s.ctx, c.ID)
	require.NoError(t, err, "the slot ends by itself")
	require.NotZero(t, exit.Code)
	require.NoError(t, s.Runtime.Delete(s.ctx, c.ID))
	require.Nil(t, s.found(t, c.ID))
}
