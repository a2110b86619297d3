package sandbox_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// brokenStore fails writes and removals while it is told to.
type brokenStore struct {
	sandbox.Store

	broken atomic.Bool
}

func (s *brokenStore) Write(name string, data []byte) error {
	if s.broken.Load() {
		return errors.New("no space left on device")
	}
	return s.Store.Write(name, data)
}

func (s *brokenStore) Remove(name string) error {
	if s.broken.Load() {
		return errors.New("input/output error")
	}
	return s.Store.Remove(name)
}

func TestADrainedAgentTakesNothingNewAndRemembersIt(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	w := boot(t, rt, root, nil)
	_, err := w.Drain(t.Context(), me, false)
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable) // it does not know how many it has
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	w.mustCreate(t, record("u", 1))
	_, err = w.Drain(t.Context(), "other", false)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	for range 2 {
		left, err := w.Drain(t.Context(), me, false)
		require.NoError(t, err)
		require.Equal(t, 1, left)
	}
	refused := func(w *world) {
		_, err := w.create(t.Context(), record("v", 1))
		requireFault(t, err, errdefs.ErrUnavailable, fault.AgentDraining)
		w.mustCreate(t, record("u", 1)) // a replay answers
		require.False(t, w.Accepting())
		watcher, err := w.Watch()
		require.NoError(t, err)
		defer w.Unwatch(watcher)
		require.False(t, watcher.Snapshot.GetAccepting())
		require.Equal(t, "Draining", watcher.Snapshot.GetNotAcceptingReason())
	}
	refused(w)
	require.NoError(t, w.Close(t.Context()))

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	refused(w)
	_, _, err = w.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	left, err := w.Drain(t.Context(), me, true)
	require.NoError(t, err)
	require.Zero(t, left)
	w.mustCreate(t, record("v", 1))
	require.NoError(t, w.Close(t.Context()))

	w = boot(t, rt, root, nil)
	require.NoError(t, w.Adopt(t.Context()))
	w.SetAccepting(true, "")
	w.mustCreate(t, record("w", 1))
}

// TestDrainingAndALostRuntimeDoNotUndoEachOther walks all four states, in every order of two changes.
func TestDrainingAndALostRuntimeDoNotUndoEachOther(t *testing.T) {
	w := newWorld(t, nil)
	watcher, err := w.Watch()
	require.NoError(t, err)
	defer w.Unwatch(watcher)
	drain := func(on bool) {
		_, err := w.Drain(t.Context(), me, !on)
		require.NoError(t, err)
	}
	type seen struct {
		accepting bool
		reason    string
	}
	for i, c := range []struct {
		change func()
		want   *seen // nil: nothing is told, for nothing that is seen has changed
	}{
		{func() { drain(true) }, &seen{false, "Draining"}},
		{func() { w.SetAccepting(false, "away") }, nil},
		{func() { w.SetAccepting(true, "") }, nil},
		{func() { drain(false) }, &seen{true, ""}},
		{func() { w.SetAccepting(false, "away") }, &seen{false, "away"}},
		{func() { drain(true) }, &seen{false, "Draining"}},
		{func() { drain(true) }, nil},
		{func() { drain(false) }, &seen{false, "away"}},
		{func() { w.SetAccepting(false, "still away") }, &seen{false, "still away"}},
		{func() { w.SetAccepting(true, "") }, &seen{true, ""}},
		{func() { w.SetAccepting(true, "") }, nil},
	} {
		c.change()
		select {
		case d := <-watcher.Deltas():
			require.NotNil(t, c.want, "step %d told %v", i, d)
			require.NotNil(t, d.Accepting)
			require.Equal(t, *c.want, seen{d.GetAccepting(), d.GetNotAcceptingReason()}, "step %d", i)
		default:
			require.Nil(t, c.want, "step %d", i)
		}
	}
}

func TestDrainCountsWhatRunsAndAdmitsNothingAfter(t *testing.T) {
	w := newWorld(t, func(c *sandbox.Config) { c.Info.Capacity = 1000 })
	w.mustCreate(t, record("deleting", 1))
	reached, release := hold(w, fake.OpDelete)
	deleted := make(chan error, 1)
	go func() {
		_, _, err := w.delete(context.Background(), record("deleting", 1).GetFence(), 0)
		deleted <- err
	}()
	<-reached
	var wg sync.WaitGroup
	var admitted atomic.Int32
	for i := range 50 {
		wg.Go(func() {
			if _, err := w.create(context.Background(), record("c"+string(rune('A'+i)), 1)); err == nil {
				admitted.Add(1)
			}
		})
	}
	left, err := w.Drain(t.Context(), me, false)
	require.NoError(t, err)
	wg.Wait()
	require.Equal(t, int(admitted.Load())+1, left)
	close(release)
	require.NoError(t, <-deleted)
	require.Len(t, w.Reports(), int(admitted.Load()))
}

func TestADrainThatCannotBeKeptIsNotInForce(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	broken := &brokenStore{Store: dir}
	w := newWorld(t, func(c *sandbox.Config) { c.State, c.Tombstones = broken, tombstones })
	broken.broken.Store(true)
	_, err := w.Drain(t.Context(), me, false)
	requireFault(t, err, errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.True(t, w.Accepting())
	broken.broken.Store(false)
	_, err = w.Drain(t.Context(), me, false)
	require.NoError(t, err)
	broken.broken.Store(true)
	_, err = w.Drain(t.Context(), me, true)
	requireFault(t, err, errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.False(t, w.Accepting())
}

// TestARefusedCreateOfANewerAttemptDoesNotSlipIn waits for the older attempt to go while the agent is drained.
func TestARefusedCreateOfANewerAttemptDoesNotSlipIn(t *testing.T) {
	w := newWorld(t, nil)
	w.mustCreate(t, record("u", 1, command("trap", "linger")))
	deleted := make(chan error, 1)
	go func() {
		_, _, err := w.delete(context.Background(), record("u", 1).GetFence(), time.Hour)
		deleted <- err
	}()
	require.Eventually(t, func() bool { return w.state("u") == agentv1.SandboxState_SANDBOX_STATE_TERMINATING }, patience, tick)
	created := make(chan error, 1)
	go func() { _, err := w.create(context.Background(), record("u", 2)); created <- err }()
	left, err := w.Drain(t.Context(), me, false)
	require.NoError(t, err)
	require.Equal(t, 1, left)
	_, _, err = w.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.NoError(t, <-deleted)
	requireFault(t, <-created, errdefs.ErrUnavailable, fault.AgentDraining)
	w.requireNothing(t)
}
