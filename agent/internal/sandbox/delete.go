package sandbox

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// killWait is how long a killed process has to be gone before the removal, which kills harder, begins.
const killWait = 3 * time.Second

// deletion is a delete that runs. The manager's lock guards it.
type deletion struct {
	stages []agentv1.DeleteStage
	// deadline is when the grace period is over; hurry is signalled when a later caller brings it forward.
	deadline time.Time
	hurry    chan struct{}
	// err is why the last try to remove failed; tries go on.
	err error
}

// Delete ends a sandbox and removes all that belonged to it. reached is called from this goroutine for each stage;
// REMOVED comes last. No grace period means the sandbox's own. A sandbox that is not there is REMOVED at once, and a create
// of its attempt that comes later is refused. A tombstone is durable before anything is done, and then the delete outlives
// the process. The delete goes on when ctx ends; repeating it joins it, and a shorter grace then counts. An error says
// that the removal has not succeeded yet; it is tried on.
func (m *Manager) Delete(ctx context.Context, req *agentv1.DeleteSandboxRequest, reached func(agentv1.DeleteStage)) (*int32, error) {
	if t := req.GetTombstone(); t != nil && !proto.Equal(t.GetFence(), req.GetFence()) {
		return nil, fault.Field("tombstone.fence", "it is not the request's")
	}
	m.mu.Lock()
	e, err := m.beginDelete(ctx, req)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if e == nil {
		reached(agentv1.DeleteStage_DELETE_STAGE_REMOVED)
		return nil, nil
	}
	for told := 0; ; {
		m.mu.Lock()
		stages, err, changed, code := e.deletion.stages, e.deletion.err, e.changed, e.report.ExitCode
		m.mu.Unlock()
		for ; told < len(stages); told++ {
			reached(stages[told])
			if stages[told] == agentv1.DeleteStage_DELETE_STAGE_REMOVED {
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

// beginDelete finds the sandbox and begins, or joins, its deletion. A nil entry means that it is not there. mu is held, and
// released while a tombstone is written.
func (m *Manager) beginDelete(ctx context.Context, req *agentv1.DeleteSandboxRequest) (*entry, error) {
	fence := req.GetFence()
	if err := m.checkCall(ctx, fence); err != nil {
		return nil, err
	}
	if e, ok := m.sandboxes[fence.GetSandboxUid()]; ok && fence.GetAttempt() > e.record.GetFence().GetAttempt() {
		return nil, mismatch(fence, e.record.GetFence().GetAttempt())
	}
	// From here on no create of this attempt is let in, nor while the tombstone is written.
	m.tombstones.put(fence.GetSandboxUid(), fence.GetAttempt(), m.clock.Now())
	if req.GetTombstone() != nil {
		if err := m.bury(ctx, req); err != nil {
			return nil, err
		}
	}
	// An older attempt than the one in force is gone: the newer one was not let in before.
	e, ok := m.sandboxes[fence.GetSandboxUid()]
	if !ok || fence.GetAttempt() < e.record.GetFence().GetAttempt() {
		return nil, nil //nolint:nilnil // not there is a valid answer
	}
	return m.startDelete(ctx, e, req.GetGracePeriod()), nil
}

// startDelete begins, or joins, the deletion of an entry. mu is held.
func (m *Manager) startDelete(ctx context.Context, e *entry, grace *durationpb.Duration) *entry {
	period := defaultGrace
	if own := e.record.GetSpec().GetTerminationGracePeriod(); own != nil {
		period = own.AsDuration()
	}
	if grace != nil {
		period = grace.AsDuration()
	}
	deadline := m.clock.Now().Add(period)
	if d := e.deletion; d != nil {
		d.err = nil
		if deadline.Before(d.deadline) {
			d.deadline = deadline
			select {
			case d.hurry <- struct{}{}:
			default:
			}
		}
		return e
	}
	e.deletion = &deletion{deadline: deadline, hurry: make(chan struct{}, 1)}
	e.cancel()
	m.set(e, func(r *agentv1.SandboxReport) { r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATING })
	detached, release := m.detach(ctx)
	m.wg.Go(func() {
		defer release()
		m.runDelete(detached, e)
	})
	return e
}

func (m *Manager) runDelete(ctx context.Context, e *entry) {
	// A create that runs was cancelled; it cleans up after itself, or has won and is then deleted as any other.
	select {
	case <-e.created:
	case <-ctx.Done():
		return
	}
	log := logr.FromContextOrDiscard(ctx).WithValues("sandbox", e.record.GetNamespace()+"/"+e.record.GetName(), "container", e.id)
	m.mu.Lock()
	failed := e.createErr != nil
	m.mu.Unlock()
	if failed {
		select {
		case <-e.gone:
			m.reachDelete(e, agentv1.DeleteStage_DELETE_STAGE_REMOVED)
		case <-ctx.Done():
		}
		return
	}
	if !m.terminate(ctx, e, log) {
		return
	}
	remove := func() error {
		ctx, cancel := cleanup(ctx)
		defer cancel()
		m.config.Logs.Release(e.id) // whose directory the runtime removes
		if err := m.config.Runtime.Delete(ctx, e.id); err != nil {
			return err
		}
		return m.config.Logs.Remove(e.id)
	}
	err := m.retry(ctx, remove, func(err error) {
		log.Error(err, "deleting a sandbox; trying on")
		m.mu.Lock()
		e.deletion.err = err
		e.wake()
		m.mu.Unlock()
	})
	if err != nil {
		return // the agent is stopping
	}
	m.forget(e, log)
	m.reachDelete(e, agentv1.DeleteStage_DELETE_STAGE_REMOVED)
	log.Info("sandbox deleted")
}

// terminate ends the process: SIGTERM, the grace period, SIGKILL to all. A process that cannot notice SIGTERM is not
// waited for. It returns false if the agent is stopping.
func (m *Manager) terminate(ctx context.Context, e *entry, log logr.Logger) bool {
	if isClosed(e.ended) {
		return true
	}
	m.mu.Lock()
	graceful := e.deletion.deadline.After(m.clock.Now())
	m.mu.Unlock()
	if graceful {
		// Asked on both sides of the signal: a process may only now begin to listen, or stop to once it has heard.
		heard := m.config.Runtime.Heeds(ctx, e.id, syscall.SIGTERM)
		if err := m.config.Runtime.Signal(ctx, e.id, syscall.SIGTERM, false); err != nil {
			if !errdefs.IsNotFound(err) && !errors.Is(err, context.Canceled) {
				log.Error(err, "sending SIGTERM")
			}
		} else {
			m.reachDelete(e, agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT)
		}
		if heard || m.config.Runtime.Heeds(ctx, e.id, syscall.SIGTERM) {
			if ended, stopping := m.waitGrace(ctx, e); ended || stopping {
				return !stopping
			}
		}
	}
	kill, cancel := context.WithTimeout(ctx, killWait)
	defer cancel()
	if err := m.config.Runtime.Signal(kill, e.id, syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		log.Error(err, "sending SIGKILL") // the removal tries harder
	} else {
		m.reachDelete(e, agentv1.DeleteStage_DELETE_STAGE_SIGKILL_SENT)
	}
	select {
	case <-e.ended:
	case <-m.clock.After(killWait):
	case <-ctx.Done():
		return false
	}
	return true
}

// waitGrace waits for the process to end, at most until the deletion's deadline, which may be brought forward.
func (m *Manager) waitGrace(ctx context.Context, e *entry) (ended, stopping bool) {
	for {
		m.mu.Lock()
		left := e.deletion.deadline.Sub(m.clock.Now())
		m.mu.Unlock()
		if left <= 0 {
			return false, false
		}
		timer := m.clock.NewTimer(left)
		select {
		case <-e.ended:
			timer.Stop()
			return true, false
		case <-ctx.Done():
			timer.Stop()
			return false, true
		case <-e.deletion.hurry:
			timer.Stop()
		case <-timer.C():
		}
	}
}

func (m *Manager) reachDelete(e *entry, stage agentv1.DeleteStage) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.deletion.stages = append(e.deletion.stages, stage)
	e.wake()
}
