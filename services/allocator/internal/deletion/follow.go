package deletion

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
)

// Why a step is repeated.
var (
	errStillThere  = errors.New("it is still there")
	errUnaccepted  = errors.New("the agent has not accepted the deletion yet")
	followPolicy   = backoff.Policy{Initial: 20 * time.Millisecond, Max: 2 * time.Second}
	freeNamePeriod = 50 * time.Millisecond
)

// follow carries out the record half of a deletion with a tombstone. It returns nil when the agent has dropped the tombstone
// and the sandbox is gone from the store, and an error when this process stops leading, or ctx ends.
func (m *Manager) follow(ctx context.Context, d *Deletion) error {
	for {
		var err error
		switch d.State() {
		case state.Queued, state.Calling, state.Uncertain, state.Repeating:
			err = m.retry(ctx, func(ctx context.Context) error { return m.resolveUnaccepted(ctx, d) })
		case state.Accepted, state.Removed, state.Rechecking:
			if err = m.retry(ctx, func(ctx context.Context) error { return m.resolve(ctx, d) }); err == nil {
				m.leaveRoom(d)
			}
		case state.Absent, state.Settled:
			err = m.awaitRemoval(ctx, d)
		case state.Settling:
			err = m.settle(ctx, d)
		case state.Dropping:
			err = m.drop(ctx, d)
		case state.Confirming:
			err = m.retry(ctx, func(ctx context.Context) error { return m.confirm(ctx, d) })
		case state.Done, state.Withdrawn:
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// resolve deletes the custom resource, if there is one, with what the delete call set.
func (m *Manager) resolve(ctx context.Context, d *Deletion) error {
	if d.absent && !d.mayLand { // no process ever wrote it
		d.learn(state.ResourceDeleted)
		return nil
	}
	r := d.current()
	found, err := m.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID)
	if err != nil {
		return err
	}
	d.absent = found == nil
	if found == nil {
		if d.mayLand {
			d.learn(state.ResourceAbsent)
		} else {
			d.learn(state.ResourceDeleted)
		}
		return nil
	}
	m.config.Store.SetResource(found)
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	if err := m.deleteResource(ctx, found, optionsOf(r.Tombstone)); err != nil {
		return err
	}
	d.learn(state.ResourceDeleted)
	return nil
}

// resolveUnaccepted waits for the agent, or makes the deletion durable by the custom resource, if there is one.
func (m *Manager) resolveUnaccepted(ctx context.Context, d *Deletion) error {
	acknowledged, changed := d.progress()
	if acknowledged {
		return nil
	}
	r := d.current()
	if found, err := m.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID); err == nil && found != nil {
		return m.resolve(ctx, d)
	}
	timer := m.config.Clock.NewTimer(apiserver.CallTimeout)
	defer timer.Stop()
	select {
	case <-changed:
	case <-ctx.Done():
	case <-timer.C():
	}
	return errUnaccepted
}

// leaveRoom gives up the room of a pending write that a deletion holds.
func (m *Manager) leaveRoom(d *Deletion) {
	if d.room {
		d.room = false
		m.persist.Abandon()
	}
}

// awaitRemoval waits until the container is gone from its agent. An agent that carries out a former leader's deletion says so
// by reporting the container no longer.
func (m *Manager) awaitRemoval(ctx context.Context, d *Deletion) error {
	m.mu.Lock()
	calling := d.calling
	m.mu.Unlock()
	if calling {
		select {
		case <-d.removed:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	fence := d.request.Fence
	return m.retry(ctx, func(context.Context) error {
		if m.config.Fleet.Reported(fence) && !m.config.Agents.Gone(fence.AgentUID) && !d.State().ContainerRemoved() {
			return errStillThere
		}
		m.containerRemoved(d)
		return nil
	})
}

// freeName frees the sandbox's name: what may still land is ignored by the store and the writer. A custom resource that
// landed in that moment, or that the informer has not shown as gone, is deleted.
func (m *Manager) freeName(ctx context.Context, d *Deletion) error {
	r := d.current()
	for d.absent && !m.config.Store.MarkGone(nameOf(r.Tombstone), r.Fence.SandboxUID) {
		if err := m.wait(ctx, freeNamePeriod); err != nil {
			return err
		}
		d.mayLand = true // one did
		if err := m.retry(ctx, func(ctx context.Context) error { return m.resolve(ctx, d) }); err != nil {
			return err
		}
	}
	return nil
}

// settle waits until no write can land any longer.
func (m *Manager) settle(ctx context.Context, d *Deletion) error {
	if err := m.freeName(ctx, d); err != nil || d.State() != state.Settling {
		return err
	}
	if err := m.wait(ctx, m.config.Settle); err != nil {
		return err
	}
	d.learn(state.SettleTimePassed)
	return nil
}

// drop tells the agent that its tombstone is needed no longer.
func (m *Manager) drop(ctx context.Context, d *Deletion) error {
	if err := m.freeName(ctx, d); err != nil {
		return err
	}
	return m.retry(ctx, func(ctx context.Context) error {
		if err := m.dropTombstone(ctx, d); err != nil {
			return err
		}
		d.learn(state.TombstoneDropped)
		return nil
	})
}

func (m *Manager) dropTombstone(ctx context.Context, d *Deletion) error {
	fence := d.request.Fence
	if m.config.Agents.Gone(fence.AgentUID) {
		return nil
	}
	client, ok := m.config.Agents.Client(fence.AgentUID)
	if !ok {
		return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithTimeout(ctx, agentTimeout)
	defer cancel()
	_, err := client.ForgetTombstone(ctx, &agentv1.ForgetTombstoneRequest{Fence: convert.FenceToProto(fence)})
	if err = rpc.FromStatus(err); errdefs.IsNotFound(err) || fault.ReasonOf(err) == fault.FenceMismatch {
		return nil
	}
	return err
}

// confirm checks that neither the agent nor the API server reports the sandbox. The informer may miss the end of a custom
// resource that it never showed.
func (m *Manager) confirm(ctx context.Context, d *Deletion) error {
	r := d.current()
	if m.config.Fleet.HasTombstone(r.Fence) {
		return errStillThere
	}
	if !d.absent && !m.config.Store.Gone(r.Fence.SandboxUID) {
		found, err := m.config.API.Lookup(ctx, nameOf(r.Tombstone), r.Fence.SandboxUID)
		if err != nil || found != nil {
			return errStillThere
		}
		m.config.Store.MarkGone(nameOf(r.Tombstone), r.Fence.SandboxUID)
	}
	d.learn(state.Confirmed)
	return nil
}

// retry repeats f until it succeeds, ctx ends or this process does not lead any longer.
func (m *Manager) retry(ctx context.Context, f func(context.Context) error) error {
	return backoff.Retry(ctx, m.config.Clock, followPolicy, func(ctx context.Context) error {
		if !m.config.Leads() {
			return backoff.Permanent(errNotLeading)
		}
		err := f(ctx)
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(4).Info("repeating a step of a deletion", obs.KeyError, err.Error())
		}
		return err
	})
}

// wait blocks for d.
func (m *Manager) wait(ctx context.Context, d time.Duration) error {
	timer := m.config.Clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}
