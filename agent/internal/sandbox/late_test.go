package sandbox_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// TestRemoveLate lets containers of an earlier process of the agent appear after adoption, beside those that were adopted,
// those that this process has made, and another agent's.
func TestRemoveLate(t *testing.T) {
	rt := newRuntime()
	put := func(process, id string, change func(*identity.Identity)) {
		t.Helper()
		f := found(t, record(id, 1), runtime.TaskRunning)
		i, err := identity.Parse(f.Labels)
		require.NoError(t, err)
		i.AgentProcess = process
		if change != nil {
			change(&i)
		}
		f.Labels = i.Labels()
		if identity.IsSlotID(id) {
			f.ID = id
		}
		rt.Put(f, runtime.Exit{})
	}
	slotOf := func(agent string) func(*identity.Identity) {
		return func(i *identity.Identity) {
			*i = identity.Identity{AgentUID: agent, AgentProcess: i.AgentProcess, State: identity.StateSlot}
		}
	}
	put("earlier", "adopted", nil)
	put("", "adopted-of-old-release", nil)
	env := boot(t, rt, t.TempDir(), func(c *sandbox.Config) { c.Process, c.Info.Capacity = "this", 10 })
	put("earlier", "not-adopted-yet", nil)
	require.NoError(t, env.RemoveLate(t.Context()))
	require.Len(t, rt.IDs(), 3, "nothing is known before adoption")
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	env.mustCreate(t, record("created", 1))

	put("earlier", "late", nil)
	put("earlier", identity.SlotID("late"), slotOf(agentUID))
	put("this", identity.SlotID("own"), slotOf(agentUID))
	put("earlier", identity.SlotID("other"), slotOf("other"))
	kept := []string{"adopted-1", "adopted-of-old-release-1", "created-1", "not-adopted-yet-1", "slot.other", "slot.own"}

	away := errors.New("containerd is away")
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpList {
			return away
		}
		return nil
	})
	require.ErrorIs(t, env.RemoveLate(t.Context()), away)
	rt.Hook(func(_ context.Context, op fake.Op, id string) error {
		if op == fake.OpDelete && id == "late-1" {
			return away
		}
		return nil
	})
	require.ErrorIs(t, env.RemoveLate(t.Context()), away)
	require.ElementsMatch(t, append([]string{"late-1"}, kept...), rt.IDs(), "one failure does not keep the others")
	rt.Hook(nil)
	require.NoError(t, env.RemoveLate(t.Context()))
	require.ElementsMatch(t, kept, rt.IDs())
	require.Len(t, env.reports(), 4)
}

// TestRemoveLateSparesCreates has a late container whose id is that of a create that runs.
func TestRemoveLateSparesCreates(t *testing.T) {
	rt := newRuntime()
	env := boot(t, rt, t.TempDir(), func(c *sandbox.Config) { c.Process = "this" })
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	creating, resume := make(chan struct{}), make(chan struct{})
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpCreate {
			close(creating)
			<-resume
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := env.create(t.Context(), record("u", 1))
		done <- err
	}()
	<-creating
	rt.Put(found(t, record("u", 1), runtime.TaskRunning), runtime.Exit{})
	require.NoError(t, env.RemoveLate(t.Context()))
	require.Equal(t, []string{"u-1"}, rt.IDs())
	close(resume)
	require.NoError(t, <-done)
}

// TestCreatesWaitForRemoveLate creates a sandbox whose container's id is that of a late one that is being removed.
func TestCreatesWaitForRemoveLate(t *testing.T) {
	rt := newRuntime()
	env := boot(t, rt, t.TempDir(), func(c *sandbox.Config) { c.Process = "this" })
	require.NoError(t, env.Adopt(t.Context()))
	env.SetAccepting(true, "")
	rt.Put(found(t, record("u", 1), runtime.TaskRunning), runtime.Exit{})
	deleting, resume := make(chan struct{}), make(chan struct{})
	var once sync.Once
	rt.Hook(func(_ context.Context, op fake.Op, _ string) error {
		if op == fake.OpDelete {
			once.Do(func() { close(deleting); <-resume })
		}
		return nil
	})
	removed := make(chan error, 1)
	go func() { removed <- env.RemoveLate(t.Context()) }()
	<-deleting

	early, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := env.create(early, record("u", 1))
	require.ErrorIs(t, err, context.DeadlineExceeded, "the create waits")
	env.mustCreate(t, record("other", 1))

	created := make(chan error, 1)
	go func() {
		_, err := env.create(t.Context(), record("u", 1))
		created <- err
	}()
	close(resume)
	require.NoError(t, <-removed)
	require.NoError(t, <-created)
	require.ElementsMatch(t, []string{"u-1", "other-1"}, rt.IDs())
}
