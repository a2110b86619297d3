package sandbox

import (
	"context"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// deletion is a delete that runs. The manager's lock guards its fields, except those of the first group.
type deletion struct {
	manager *Manager
	entry   *entry

	stages []agentv1.DeleteStage
	// grace is the time between SIGTERM and SIGKILL; regraced is signaled when a later call replaces it.
	grace    time.Duration
	regraced chan struct{}
	// termSent is when the first SIGTERM was sent; zero until then.
	termSent time.Time
	// err is why the last attempt to remove the container failed; it is repeated until it succeeds.
	err error
}

// setGrace replaces the grace period if the call sets one, longer or shorter.
func (d *deletion) setGrace(grace *durationpb.Duration) {
	if grace == nil {
		return
	}
	d.grace = grace.AsDuration()
	select {
	case d.regraced <- struct{}{}:
	default:
	}
}

// graceOf returns the grace period of a delete: the call's, or else the sandbox's own, or else the default.
func graceOf(e *entry, override *durationpb.Duration) time.Duration {
	for _, d := range []*durationpb.Duration{override, e.record.GetSpec().GetTerminationGracePeriod()} {
		if d != nil {
			return d.AsDuration()
		}
	}
	return defaultGrace
}

// Delete ends a sandbox and removes all that belonged to it. reached is called from this goroutine for each stage;
// REMOVED comes last. A sandbox that does not exist is REMOVED at once, and a create of its attempt that comes later is
// refused. A tombstone is durable before the container is touched, and then the delete outlives the agent process.
//
// The delete continues when ctx ends. A repeated call joins it; a grace period that it sets replaces the one before, longer
// or shorter, counted from the first SIGTERM. An error means that the removal has not succeeded yet; it is repeated in the
// background.
func (m *Manager) Delete(ctx context.Context, req *agentv1.DeleteSandboxRequest, reached func(agentv1.DeleteStage)) (*int32, error) {
	if t := req.GetTombstone(); t != nil {
		if !proto.Equal(t.GetFence(), req.GetFence()) {
			return nil, fault.Field("tombstone.fence", "it differs from the request's")
		}
		if err := m.checkNamespace(t.GetNamespace()); err != nil {
			return nil, err
		}
	}
	e, err := m.beginDelete(ctx, req)
	if err != nil {
		return nil, err
	}
	if e == nil {
		reached(agentv1.DeleteStage_DELETE_STAGE_REMOVED)
		return nil, nil
	}
	for passed := 0; ; {
		m.mu.Lock()
		stages, err, changed, code := e.deletion.stages, e.deletion.err, e.changed, e.report.ExitCode
		m.mu.Unlock()
		for ; passed < len(stages); passed++ {
			reached(stages[passed])
			if stages[passed] == agentv1.DeleteStage_DELETE_STAGE_REMOVED {
				return code, nil
			}
		}
		if err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-m.life.Done():
			return nil, errClosing()
		case <-changed:
		}
	}
}

// beginDelete finds the sandbox and begins, or joins, its deletion. A nil entry means that the sandbox does not exist.
func (m *Manager) beginDelete(ctx context.Context, req *agentv1.DeleteSandboxRequest) (*entry, error) {
	if err := m.acceptDelete(ctx, req.GetFence()); err != nil {
		return nil, err
	}
	grace := req.GetGracePeriod()
	if t := req.GetTombstone(); t != nil {
		t, _ = proto.Clone(t).(*agentv1.Tombstone)
		if grace != nil {
			t.GracePeriod = grace
		}
		grace = t.GetGracePeriod()
		if t.GetTraceparent() == "" {
			t.Traceparent = obs.Traceparent(ctx)
		}
		if err := m.tombstones.Put(ctx, t); err != nil {
			return nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.gate.closed { // the next agent process carries a delete with a tombstone on
		return nil, errClosing()
	}
	// An older attempt than the one in force is gone: the newer one was not admitted before.
	e, ok := m.sandboxes[req.GetFence().GetSandboxUid()]
	if !ok || req.GetFence().GetAttempt() < e.fence.Attempt {
		return nil, nil //nolint:nilnil // a sandbox that does not exist is a valid answer
	}
	m.startDelete(ctx, e, grace)
	return e, nil
}

// acceptDelete checks a delete. Once it has returned without an error, no create of the attempt is admitted.
func (m *Manager) acceptDelete(ctx context.Context, fence *agentv1.Fence) error {
	caller, err := callerOf(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.checkCall(caller, fence); err != nil {
		return err
	}
	if e, ok := m.sandboxes[fence.GetSandboxUid()]; ok && fence.GetAttempt() > e.fence.Attempt {
		return errMismatch(fence, e.fence.Attempt)
	}
	m.tombstones.Remember(fence.GetSandboxUid(), fence.GetAttempt())
	return nil
}

// startDelete begins, or joins, the deletion of an entry. mu is held.
func (m *Manager) startDelete(ctx context.Context, e *entry, grace *durationpb.Duration) {
	if d := e.deletion; d != nil {
		d.err = nil
		d.setGrace(grace)
		return
	}
	e.deletion = &deletion{manager: m, entry: e, grace: graceOf(e, grace), regraced: make(chan struct{}, 1)}
	e.cancel()
	m.set(e, eventDelete, nil)
	detached, release := m.detach(ctx)
	m.wg.Go(func() {
		defer release()
		e.deletion.run(detached)
	})
}
