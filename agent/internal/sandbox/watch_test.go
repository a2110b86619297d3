package sandbox_test

import (
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func TestWatchSendsSnapshotThenChanges(t *testing.T) {
	env := newEnv(t, nil)
	env.status.SetImages([]string{"a", "b"})
	env.mustCreate(t, record("old", 1))
	watcher, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(watcher)
	require.Len(t, watcher.Snapshot.GetSandboxes(), 1)
	require.Equal(t, []string{"a", "b"}, watcher.Snapshot.GetImages())
	require.True(t, watcher.Snapshot.GetAccepting())

	env.status.SetImages([]string{"b", "c"})
	d := <-watcher.Deltas()
	require.Equal(t, []string{"c"}, d.GetImagesAdded())
	require.Equal(t, []string{"a"}, d.GetImagesRemoved())
	env.status.SetImages([]string{"b", "c"})
	env.SetAccepting(false, "away")
	d = <-watcher.Deltas()
	require.False(t, d.GetAccepting())
	require.NotNil(t, d.Accepting)
	require.Equal(t, "away", d.GetNotAcceptingReason())
	env.SetAccepting(true, "")
	<-watcher.Deltas()

	env.mustCreate(t, record("new", 1))
	_, _, err = env.delete(t.Context(), record("new", 1).GetFence(), 0)
	require.NoError(t, err)
	var states []agentv1.SandboxState
	for len(states) == 0 || states[len(states)-1] != agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		d := <-watcher.Deltas()
		require.Equal(t, "new", d.GetSandboxes()[0].GetRecord().GetFence().GetSandboxUid())
		states = append(states, d.GetSandboxes()[0].GetState())
	}
	require.Equal(t, []agentv1.SandboxState{
		agentv1.SandboxState_SANDBOX_STATE_CREATING, agentv1.SandboxState_SANDBOX_STATE_RUNNING,
		agentv1.SandboxState_SANDBOX_STATE_TERMINATING, agentv1.SandboxState_SANDBOX_STATE_TERMINATING,
		agentv1.SandboxState_SANDBOX_STATE_TERMINATED,
	}, states)
}

func TestSlowWatcherIsEnded(t *testing.T) {
	env := newEnv(t, nil)
	slow, err := env.status.Watch()
	require.NoError(t, err)
	for i := range 5000 {
		env.status.SetImages([]string{fmt.Sprintf("image-%05d", i)})
	}
	n := 0
	for range slow.Deltas() {
		n++
	}
	require.Positive(t, n)
	require.Less(t, n, 5000)
	requireFault(t, slow.Err(), errdefs.ErrResourceExhausted, fault.Overloaded)
	again, err := env.status.Watch()
	require.NoError(t, err)
	require.Equal(t, []string{"image-04999"}, again.Snapshot.GetImages())
	env.status.Unwatch(again)
}
