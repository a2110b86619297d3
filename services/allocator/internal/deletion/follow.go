package deletion

import (
	"context"
	"errors"
	"time"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Why a step is repeated.
var (
	errStillThere  = errors.New("it is still there")
	errUnaccepted  = errors.New("the agent has not accepted the deletion yet")
	followPolicy   = backoff.Policy{Initial: 20 * time.Millisecond, Max: 2 * time.Second}
	freeNamePeriod = 50 * time.Millisecond
)

// follower carries out the record half of one deletion: it deletes the custom resource, and then ends the tombstone.
type follower struct {
	config   *Config
	deletion *Deletion
}

func followerOf(d *Deletion) follower { return follower{config: &d.manager.config, deletion: d} }

// run carries the record half out. It returns nil when the agent has dropped the tombstone and the sandbox is gone from the
// store, and an error when this process stops leading, or ctx ends.
func (f follower) run(ctx context.Context) error {
	for {
		var err error
		switch f.deletion.State() {
		case state.Queued, state.Calling, state.Uncertain, state.Repeating:
			err = f.retry(ctx, f.resolveUnaccepted)
		case state.Accepted, state.Removed, state.Rechecking:
			if err = f.retry(ctx, f.resolve); err == nil {
				f.leaveRoom()
			}
		case state.Absent, state.Settled:
			err = f.awaitRemoval(ctx)
		case state.Settling:
			err = f.settle(ctx)
		case state.Dropping:
			err = f.drop(ctx)
		case state.Confirming:
			err = f.retry(ctx, f.confirm)
		case state.Done, state.Withdrawn:
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// resolve deletes the custom resource, if there is one, with what the delete call set.
func (f follower) resolve(ctx context.Context) error {
	if f.deletion.absent && !f.deletion.mayLand { // no process ever wrote it
		f.deletion.learn(state.ResourceDeleted)
		return nil
	}
	r := f.deletion.current()
	found, err := f.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID)
	if err != nil {
		return err
	}
	f.deletion.absent = found == nil
	if found == nil {
		if f.deletion.mayLand {
			f.deletion.learn(state.ResourceAbsent)
		} else {
			f.deletion.learn(state.ResourceDeleted)
		}
		return nil
	}
	f.config.Store.SetResource(found)
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	if err := f.deletion.manager.resources.remove(ctx, found, optionsOf(r.Tombstone)); err != nil {
		return err
	}
	f.deletion.learn(state.ResourceDeleted)
	return nil
}

// resolveUnaccepted waits for the agent, or makes the deletion durable by the custom resource, if there is one.
func (f follower) resolveUnaccepted(ctx context.Context) error {
	acknowledged, changed := f.deletion.progress()
	if acknowledged {
		return nil
	}
	r := f.deletion.current()
	if found, err := f.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID); err == nil && found != nil {
		return f.resolve(ctx)
	}
	timer := f.config.Clock.NewTimer(apiserver.CallTimeout)
	defer timer.Stop()
	select {
	case <-changed:
	case <-ctx.Done():
	case <-timer.C():
	}
	return errUnaccepted
}

// leaveRoom gives up the room of a pending write that a deletion holds.
func (f follower) leaveRoom() {
	if f.deletion.room {
		f.deletion.room = false
		f.config.Persist.Abandon()
	}
}

// awaitRemoval waits until the container is gone from its agent. An agent that carries out a former leader's deletion says so
// by reporting the container no longer.
func (f follower) awaitRemoval(ctx context.Context) error {
	if f.deletion.beingCalled() {
		select {
		case <-f.deletion.removed:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fence := f.deletion.request.Fence
	return f.retry(ctx, func(context.Context) error {
		if f.config.Fleet.Reported(fence) && !f.config.Agents.Gone(fence.AgentUID) && !f.deletion.State().ContainerRemoved() {
			return errStillThere
		}
		f.deletion.manager.containerRemoved(f.deletion)
		return nil
	})
}

// freeName frees the sandbox's name: what may still land is ignored by the store and the writer. A custom resource that
// landed in that moment, or that the informer has not shown as gone, is deleted.
func (f follower) freeName(ctx context.Context) error {
	r := f.deletion.current()
	for f.deletion.absent && !f.config.Store.MarkGone(nameOf(r.Tombstone), r.Fence.SandboxUID) {
		if err := f.wait(ctx, freeNamePeriod); err != nil {
			return err
		}
		f.deletion.mayLand = true // one did
		if err := f.retry(ctx, f.resolve); err != nil {
			return err
		}
	}
	return nil
}

// settle waits until no write can land any longer.
func (f follower) settle(ctx context.Context) error {
	if err := f.freeName(ctx); err != nil || f.deletion.State() != state.Settling {
		return err
	}
	if err := f.wait(ctx, f.config.Settle); err != nil {
		return err
	}
	f.deletion.learn(state.SettleTimePassed)
	return nil
}

// removeSuperseded has the containers of superseded attempts deleted, and waits until they are. Without the tombstone, nothing
// would say that they must not be adopted.
func (f follower) removeSuperseded(ctx context.Context) error {
	for _, s := range f.deletion.current().Tombstone.GetSuperseded() {
		err := f.retry(ctx, func(context.Context) error {
			return f.removeAttempt(identity.FenceOf(s.GetFence()), nameOf(f.deletion.current().Tombstone))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// removeAttempt returns nil if a container is certainly gone, and has it deleted if its agent reports it under the name of the
// deleted sandbox. The agent that keeps the tombstone can have named any container: one of another name, or one that a custom
// resource was written for, is no superseded attempt.
func (f follower) removeAttempt(fence identity.Fence, name store.Key) error {
	m := f.deletion.manager
	switch {
	case f.config.Agents.Gone(fence.AgentUID):
		return nil
	case m.Deleting(fence):
		return errStillThere
	case !f.config.Announced(fence.AgentUID):
		return errUnreachable
	case f.config.Fleet.Superseded(fence, name.Namespace, name.Name):
		m.Request(Request{Fence: fence})
		return errStillThere
	}
	return nil
}

// drop has the agent drop its tombstone, which is no longer needed.
func (f follower) drop(ctx context.Context) error {
	if err := f.removeSuperseded(ctx); err != nil {
		return err
	}
	if err := f.freeName(ctx); err != nil {
		return err
	}
	agent := callerOf(f.deletion)
	return f.retry(ctx, func(ctx context.Context) error {
		if err := agent.dropTombstone(ctx); err != nil {
			return err
		}
		f.deletion.learn(state.TombstoneDropped)
		return nil
	})
}

// confirm checks that neither the agent nor the API server reports the sandbox. The informer may miss the end of a custom
// resource that it never showed.
func (f follower) confirm(ctx context.Context) error {
	r := f.deletion.current()
	if f.config.Fleet.HasTombstone(r.Fence) {
		return errStillThere
	}
	if !f.deletion.absent && !f.config.Store.Gone(nameOf(r.Tombstone), r.Fence.SandboxUID) {
		found, err := f.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID)
		if err != nil || found != nil {
			return errStillThere
		}
		f.config.Store.MarkGone(nameOf(r.Tombstone), r.Fence.SandboxUID)
	}
	f.deletion.learn(state.Confirmed)
	return nil
}

// retry repeats a step until it succeeds, ctx ends or this process does not lead any longer.
func (f follower) retry(ctx context.Context, step func(context.Context) error) error {
	return backoff.Retry(ctx, f.config.Clock, followPolicy, func(ctx context.Context) error {
		if !f.config.Leads() {
			return backoff.Permanent(errNotLeading)
		}
		err := step(ctx)
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(4).Info("repeating a step of a deletion", obs.KeyError, err.Error())
		}
		return err
	})
}

// wait blocks for f.deletion.
func (f follower) wait(ctx context.Context, d time.Duration) error {
	timer := f.config.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}
