package sandbox

import (
	"context"
	"errors"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// killTimeout is how long a killed process has to be gone before the removal, which kills harder, begins.
const killTimeout = 3 * time.Second

// run carries the deletion out. It returns early if the agent is stopping.
func (d *deletion) run(ctx context.Context) {
	m, e := d.manager, d.entry
	ctx, span := obs.Tracer().Start(ctx, "terminate", trace.WithAttributes(
		attribute.String(obs.AttrSandboxNamespace, e.record.GetNamespace()), attribute.String(obs.AttrSandboxName, e.record.GetName()),
		attribute.String(obs.AttrSandboxUID, e.fence.SandboxUID), attribute.Int64(obs.AttrAttempt, e.fence.Attempt)))
	defer span.End()
	// A create that runs was canceled; it cleans up after itself, or has succeeded and is then deleted as any other.
	select {
	case <-e.created:
	case <-ctx.Done():
		return
	}
	m.mu.Lock()
	failed := e.createErr != nil
	m.mu.Unlock()
	if failed {
		select {
		case <-e.gone:
			d.reach(agentv1.DeleteStage_DELETE_STAGE_REMOVED)
		case <-ctx.Done():
		}
		return
	}
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, e.name(), obs.KeyContainer, e.id)
	if !d.terminate(ctx, log) {
		return
	}
	err := m.retry(ctx, func() error {
		ctx, cancel := cleanup(ctx)
		defer cancel()
		return m.launcher.Remove(ctx, e.id)
	}, func(err error) {
		log.Error(err, "deleting sandbox; will retry")
		m.mu.Lock()
		defer m.mu.Unlock()
		d.err = err
		e.wake()
	})
	if err != nil {
		return // the agent is stopping
	}
	m.remove(ctx, e)
	d.reach(agentv1.DeleteStage_DELETE_STAGE_REMOVED)
	log.Info("sandbox deleted")
}

// reach appends a stage.
func (d *deletion) reach(stage agentv1.DeleteStage) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	d.stages = append(d.stages, stage)
	d.entry.wake()
}

// terminate ends the process: SIGTERM, the grace period, SIGKILL to all. A process that ignores SIGTERM gets no grace
// period. It returns false if the agent is stopping.
func (d *deletion) terminate(ctx context.Context, log logr.Logger) bool {
	m, e := d.manager, d.entry
	if isClosed(e.ended) {
		return true
	}
	m.mu.Lock()
	graceful := d.grace > 0
	m.mu.Unlock()
	if graceful && d.sendTerm(ctx, log) {
		if ended, stopping := d.awaitGrace(ctx); ended || stopping {
			return !stopping
		}
	}
	kill, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := m.config.Runtime.Signal(kill, e.id, syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		log.Error(err, "sending SIGKILL") // the removal kills harder
	} else {
		d.reach(agentv1.DeleteStage_DELETE_STAGE_SIGKILL_SENT)
	}
	select {
	case <-e.ended:
	case <-m.clock.After(killTimeout):
	case <-ctx.Done():
		return false
	}
	return true
}

// sendTerm sends SIGTERM and reports whether the process handles it.
func (d *deletion) sendTerm(ctx context.Context, log logr.Logger) bool {
	m, e := d.manager, d.entry
	// Asked before and after the signal: a process may install its handler only now, or remove it once it was called.
	before := m.config.Runtime.HandlesSignal(ctx, e.id, syscall.SIGTERM)
	err := m.config.Runtime.Signal(ctx, e.id, syscall.SIGTERM, false)
	m.mu.Lock()
	d.termSent = m.clock.Now()
	m.mu.Unlock()
	switch {
	case err == nil:
		d.reach(agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT)
	case !errdefs.IsNotFound(err) && !errors.Is(err, context.Canceled):
		log.Error(err, "sending SIGTERM")
	}
	return before || m.config.Runtime.HandlesSignal(ctx, e.id, syscall.SIGTERM)
}

// awaitGrace waits for the process to end, at most for the grace period since SIGTERM, which may be replaced meanwhile.
func (d *deletion) awaitGrace(ctx context.Context) (ended, stopping bool) {
	m := d.manager
	for {
		m.mu.Lock()
		left := d.termSent.Add(d.grace).Sub(m.clock.Now())
		m.mu.Unlock()
		if left <= 0 {
			return false, false
		}
		timer := m.clock.NewTimer(left)
		select {
		case <-d.entry.ended:
			timer.Stop()
			return true, false
		case <-ctx.Done():
			timer.Stop()
			return false, true
		case <-d.regraced:
			timer.Stop()
		case <-timer.C():
		}
	}
}
