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
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// brokenStore fails writes and removals while broken.
type brokenStore struct {
	sandbox.Files

	broken atomic.Bool
}

func (s *brokenStore) Write(name string, data []byte) error {
	if s.broken.Load() {
		return errors.New("no space left on device")
	}
	return s.Files.Write(name, data)
}

func (s *brokenStore) Remove(name string) error {
	if s.broken.Load() {
		return errors.New("input/output error")
	}
	return s.Files.Remove(name)
}

func TestDrainIsDurable(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	_, err := env.Drain(t.Context(), agentUID, false)
	requireFault(t, err, errdefs.ErrUnavailable, fault.RuntimeUnavailable) // it does not know its sandboxes yet
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("u", 1))
	_, err = env.Drain(t.Context(), "other", false)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	for range 2 {
		left, err := env.Drain(t.Context(), agentUID, false)
		require.NoError(t, err)
		require.Equal(t, 1, left)
	}
	refused := func(env *testEnv) {
		_, err := env.create(t.Context(), record("v", 1))
		requireFault(t, err, errdefs.ErrUnavailable, fault.AgentDraining)
		env.mustCreate(t, record("u", 1)) // a repeated create returns the sandbox
		require.False(t, env.Accepting())
		watcher, err := env.status.Watch()
		require.NoError(t, err)
		defer env.status.Unwatch(watcher)
		require.False(t, watcher.Snapshot.GetAccepting())
		require.Equal(t, "Draining", watcher.Snapshot.GetNotAcceptingReason())
	}
	refused(env)
	require.NoError(t, env.Close(t.Context()))

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	refused(env)
	_, _, err = env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	left, err := env.Drain(t.Context(), agentUID, true)
	require.NoError(t, err)
	require.Zero(t, left)
	env.mustCreate(t, record("v", 1))
	require.NoError(t, env.Close(t.Context()))

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("w", 1))
}

// TestDrainAndRuntimeStateAreIndependent visits all four states, with every order of two changes.
func TestDrainAndRuntimeStateAreIndependent(t *testing.T) {
	env := newEnv(t, nil)
	watcher, err := env.status.Watch()
	require.NoError(t, err)
	defer env.status.Unwatch(watcher)
	drain := func(on bool) {
		_, err := env.Drain(t.Context(), agentUID, !on)
		require.NoError(t, err)
	}
	type seen struct {
		accepting bool
		reason    string
	}
	for i, c := range []struct {
		change func()
		want   *seen // nil: no delta, because nothing visible has changed
	}{
		{func() { drain(true) }, &seen{false, "Draining"}},
		{func() { env.SetAccepting(false, "away") }, nil},
		{func() { env.SetAccepting(true, "") }, nil},
		{func() { drain(false) }, &seen{true, ""}},
		{func() { env.SetAccepting(false, "away") }, &seen{false, "away"}},
		{func() { drain(true) }, &seen{false, "Draining"}},
		{func() { drain(true) }, nil},
		{func() { drain(false) }, &seen{false, "away"}},
		{func() { env.SetAccepting(false, "still away") }, &seen{false, "still away"}},
		{func() { env.SetAccepting(true, "") }, &seen{true, ""}},
		{func() { env.SetAccepting(true, "") }, nil},
	} {
		c.change()
		select {
		case d := <-watcher.Deltas():
			require.NotNil(t, c.want, "step %d sent %v", i, d)
			require.NotNil(t, d.Accepting)
			require.Equal(t, *c.want, seen{d.GetAccepting(), d.GetNotAcceptingReason()}, "step %d", i)
		default:
			require.Nil(t, c.want, "step %d", i)
		}
	}
}

func TestDrainCountsAdmittedSandboxes(t *testing.T) {
	env := newEnv(t, func(c *sandbox.Config) { c.Info.Capacity = 1000 })
	env.mustCreate(t, record("deleting", 1))
	reached, release := hold(env, fake.OpDelete)
	deleted := make(chan error, 1)
	go func() {
		_, _, err := env.delete(context.Background(), record("deleting", 1).GetFence(), 0)
		deleted <- err
	}()
	<-reached
	var wg sync.WaitGroup
	var admitted atomic.Int32
	for i := range 50 {
		wg.Go(func() {
			if _, err := env.create(context.Background(), record("c"+string(rune('A'+i)), 1)); err == nil {
				admitted.Add(1)
			}
		})
	}
	left, err := env.Drain(t.Context(), agentUID, false)
	require.NoError(t, err)
	wg.Wait()
	require.Equal(t, int(admitted.Load())+1, left)
	close(release)
	require.NoError(t, <-deleted)
	require.Len(t, env.reports(), int(admitted.Load()))
}

func TestDrainFailsIfStateCannotBeWritten(t *testing.T) {
	dir, tombstones := openState(t, t.TempDir())
	broken := &brokenStore{Files: dir}
	env := newEnv(t, func(c *sandbox.Config) { c.State, c.Tombstones = broken, tombstones })
	broken.broken.Store(true)
	_, err := env.Drain(t.Context(), agentUID, false)
	requireFault(t, err, errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.True(t, env.Accepting())
	broken.broken.Store(false)
	_, err = env.Drain(t.Context(), agentUID, false)
	require.NoError(t, err)
	broken.broken.Store(true)
	_, err = env.Drain(t.Context(), agentUID, true)
	requireFault(t, err, errdefs.ErrUnavailable, fault.AgentUnavailable)
	require.False(t, env.Accepting())
}

// TestDrainRefusesWaitingCreate drains the agent while a create waits for an older attempt to end.
func TestDrainRefusesWaitingCreate(t *testing.T) {
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1, command("trap", "linger")))
	deleted := make(chan error, 1)
	go func() {
		_, _, err := env.delete(context.Background(), record("u", 1).GetFence(), time.Hour)
		deleted <- err
	}()
	require.Eventually(t, func() bool { return env.state("u") == agentv1.SandboxState_SANDBOX_STATE_TERMINATING }, testkit.Timeout, testkit.Tick)
	created := make(chan error, 1)
	go func() { _, err := env.create(context.Background(), record("u", 2)); created <- err }()
	left, err := env.Drain(t.Context(), agentUID, false)
	require.NoError(t, err)
	require.Equal(t, 1, left)
	_, _, err = env.delete(t.Context(), record("u", 1).GetFence(), 0)
	require.NoError(t, err)
	require.NoError(t, <-deleted)
	requireFault(t, <-created, errdefs.ErrUnavailable, fault.AgentDraining)
	env.requireNothing(t)
}
