package sandbox_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// end ends the process of a sandbox and waits until the manager has recorded that.
func (env *testEnv) end(t *testing.T, uid string) {
	t.Helper()
	id, ended, err := env.Log(t.Context(), record(uid, 1).GetFence())
	require.NoError(t, err)
	env.runtime.Exit(id, runtime.Exit{Code: 3})
	<-ended
}

// TestEndedSandboxesHoldNoCapacity fills an agent several times over with sandboxes that end.
func TestEndedSandboxesHoldNoCapacity(t *testing.T) {
	env := newEnv(t, func(c *sandbox.Config) { c.Info.Capacity = 5 })
	for i := range 5 {
		env.mustCreate(t, record(fmt.Sprint("ended", i), 1, ports(80+int32(i))))
	}
	_, err := env.create(t.Context(), record("refused", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	for i := range 5 {
		env.end(t, fmt.Sprint("ended", i))
	}
	for i := range 5 {
		env.mustCreate(t, record(fmt.Sprint("runs", i), 1, ports(80+int32(i))))
	}
	_, err = env.create(t.Context(), record("refused", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	for i := range 5 {
		uid := fmt.Sprint("ended", i)
		require.Equal(t, stateStopped, env.state(uid), "the record stays until it is deleted")
		_, _, err := env.Log(t.Context(), record(uid, 1).GetFence())
		require.NoError(t, err, "and so does the log")
	}
	require.Len(t, env.runtime.IDs(), 10)
}

// TestEndedSandboxesHoldNoCapacityAfterRestart lets some of the processes end while no agent runs.
func TestEndedSandboxesHoldNoCapacityAfterRestart(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	env := boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	for i, uid := range []string{"before", "meanwhile", "runs"} {
		env.mustCreate(t, record(uid, 1, ports(80+int32(i))))
	}
	env.end(t, "before")
	require.NoError(t, env.Close(t.Context()))
	rt.Exit("meanwhile-1", runtime.Exit{Code: 1})

	env = boot(t, rt, root, nil)
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("next", 1, ports(80)))
	_, err := env.create(t.Context(), record("taken", 1, ports(82)))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.PortConflict)
	env.mustCreate(t, record("last", 1, ports(81)))
	_, err = env.create(t.Context(), record("refused", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	require.Equal(t, stateStopped, env.state("before"))
	require.Equal(t, stateStopped, env.state("meanwhile"))
}

// TestEndedSandboxMakesRoomForASlot watches the room that the slots are given.
func TestEndedSandboxMakesRoomForASlot(t *testing.T) {
	env, slots := withSlots(t, 0)
	env.mustCreate(t, record("a", 1))
	env.mustCreate(t, record("b", 1))
	require.Equal(t, 1, slots.lastRoom())
	env.end(t, "a")
	require.Eventually(t, func() bool { return slots.lastRoom() == 2 }, testkit.Timeout, testkit.Tick)
	_, _, err := env.delete(t.Context(), record("a", 1).GetFence(), 0)
	require.NoError(t, err)
	require.Equal(t, 2, slots.lastRoom(), "its unit is given back once")
}

// TestFailedCleanupHoldsCapacity: what a failed create left may still run.
func TestFailedCleanupHoldsCapacity(t *testing.T) {
	env := newEnv(t, func(c *sandbox.Config) { c.Info.Capacity = 1 })
	env.runtime.Hook(failing(fake.OpStart, fake.OpDelete))
	_, err := env.create(t.Context(), record("u", 1))
	require.Error(t, err)
	_, err = env.create(t.Context(), record("v", 1))
	requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
	env.runtime.Hook(nil)
	require.Eventually(t, func() bool { _, err := env.create(t.Context(), record("v", 1)); return err == nil }, testkit.Timeout, testkit.Tick)
}

var errAway = errors.New("containerd is away")
