package sandbox

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"golang.org/x/sync/errgroup"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const adoptParallel = 8

// Adopt rebuilds the sandboxes from the runtime, once, before any call is taken. After an error it may be called again.
//
//	task      report  started or persisted   then
//	running   -       -                      RUNNING
//	stopped   -       -                      STOPPED; its exit is made durable
//	none      yes     -                      STOPPED, as its report says
//	none      no      yes                    STOPPED: it was acknowledged and its process is lost
//	none      no      no                     removed: it was never acknowledged
//	created   -       -                      removed: it never ran
//	claiming  -       -                      removed: it was never acknowledged
//
// A sandbox whose attempt has a tombstone is deleted, with the tombstone's grace period counted from the beginning.
//
// A container whose labels or record cannot be read, or that is an older attempt beside a newer one, is removed unless it
// was acknowledged; an unreadable one that was acknowledged is reported with what its labels say. Slots of an earlier agent
// process, unclaimed or half claimed, are removed in the background.
func (m *Manager) Adopt(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	found, err := m.config.Runtime.List(ctx, ownLabels(m.config.Info.GetPodUid()))
	if err != nil {
		return fmt.Errorf("adopting sandboxes: %w", err)
	}
	a := &adoption{manager: m, log: log, keep: map[string]*adopted{}}
	a.sort(found)
	swept, err := a.prepare(ctx)
	if err != nil {
		return fmt.Errorf("adopting sandboxes: %w", err)
	}
	if err := a.recordExits(ctx); err != nil {
		return err
	}
	if err := a.takeOver(ctx); err != nil {
		return err
	}
	log.Info("sandboxes adopted", obs.KeySandboxes, len(a.keep), obs.KeyRemoved, len(a.drop), obs.KeyLogsRemoved, len(swept))
	return nil
}

// adoption is one call of Adopt: what is to be done with the containers that were found.
type adoption struct {
	manager *Manager
	log     logr.Logger

	keep  map[string]*adopted // by sandbox uid
	drop  []string            // ids of containers
	slots []string            // ids of slots
}

// adopted is a container that becomes a sandbox.
type adopted struct {
	*entry

	found runtime.Found
}

// sort decides what becomes of each container. It does no I/O but reading logs' start times.
func (a *adoption) sort(found []runtime.Found) {
	for _, f := range found {
		startedAt, started := a.manager.config.Logs.StartedAt(f.ID)
		e, why := recognize(f, started, startedAt, a.manager.config.Info.GetPodIp())
		switch {
		case e == nil && a.manager.config.Slots != nil && identity.IsSlotID(f.ID):
			a.log.V(2).Info("removing slot of an earlier agent process", obs.KeyContainer, f.ID, obs.KeyReason, why)
			a.slots = append(a.slots, f.ID)
			continue
		case e == nil:
			a.log.Info("removing container that is no sandbox", obs.KeyContainer, f.ID, obs.KeyReason, why)
			a.drop = append(a.drop, f.ID)
			continue
		}
		newest, other := &adopted{e, f}, a.keep[e.fence.SandboxUID]
		if other != nil {
			if other.fence.Attempt > newest.fence.Attempt {
				newest, other = other, newest
			}
			a.log.Info("removing older attempt", obs.KeyContainer, other.id)
			a.drop = append(a.drop, other.id)
		}
		a.keep[e.fence.SandboxUID] = newest
	}
}

// prepare removes what is not kept, and takes up the logs of what is. It returns the ids of the logs that it removed.
func (a *adoption) prepare(ctx context.Context) ([]string, error) {
	if len(a.slots) > 0 {
		a.manager.config.Slots.Drop(a.slots...)
	}
	var g errgroup.Group
	g.SetLimit(adoptParallel)
	for _, id := range a.drop {
		g.Go(func() error { return a.manager.launcher.Remove(ctx, id) })
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, e := range a.keep {
		ids[e.id] = true
	}
	swept, err := a.manager.config.Logs.Sweep(ids)
	if err != nil {
		return nil, err
	}
	for id := range ids {
		a.manager.config.Logs.Adopt(id)
	}
	return swept, nil
}

// recordExits makes the exits of those processes durable that ended while no agent ran.
func (a *adoption) recordExits(ctx context.Context) error {
	var g errgroup.Group
	g.SetLimit(adoptParallel)
	for _, e := range a.keep {
		if e.found.Task == runtime.TaskRunning || (e.found.Task == runtime.TaskNone && e.found.Report != nil) {
			continue
		}
		g.Go(func() error {
			if e.found.Task == runtime.TaskStopped {
				exit, err := a.manager.config.Runtime.Wait(ctx, e.id)
				if err != nil {
					return fmt.Errorf("adopting sandbox %s: %w", e.id, err)
				}
				describeExit(e.report, exit)
			} else {
				describeLost(e.report, a.manager.clock.Now())
			}
			e.report.State = stateStopped
			f := follower{a.manager, e.entry}
			if err := f.finish(ctx, e.report); err != nil {
				a.log.Error(err, "keeping the exit of sandbox", obs.KeyContainer, e.id)
			}
			return nil
		})
	}
	return g.Wait()
}

// takeOver makes the entries the manager's own, follows those that run, and deletes those that have a tombstone.
func (a *adoption) takeOver(ctx context.Context) error {
	m := a.manager
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gate.closed {
		return errClosing()
	}
	for uid, e := range a.keep {
		m.sandboxes[uid] = e.entry
		close(e.created)
		m.config.Status.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{e.report}})
		if e.report.GetState() == stateStopped {
			close(e.ended)
		} else {
			m.follow(ctx, e.entry)
		}
		if t := m.tombstones.Lookup(uid); t.GetFence().GetAttempt() >= e.fence.Attempt {
			a.log.Info("resuming deletion of sandbox with tombstone", obs.KeySandbox, e.name(), obs.KeyContainer, e.id)
			m.startDelete(obs.WithTraceparent(ctx, t.GetTraceparent()), e.entry, t.GetGracePeriod())
		}
	}
	m.gate.adopted = true
	m.updateRoom()
	m.config.Status.Open()
	return nil
}
