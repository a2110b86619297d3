package sandbox

import (
	"cmp"
	"context"
	"errors"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// createRun is the work of one create.
type createRun struct {
	manager *Manager
	entry   *entry
}

// run starts the sandbox. The outcome is decided under the lock, so that a caller that leaves and a delete that comes
// at the same moment either find it started or make it fail. launched is called when it needs no slot any longer.
func (c createRun) run(ctx context.Context, persisted bool, launched func()) {
	m, e := c.manager, c.entry
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues(obs.KeySandbox, e.name()))
	reach := c.stageTimer()
	result, err := m.launcher.Launch(ctx, e.record, persisted, func(s runtime.Stage) { reach(stageOf(s)) })
	launched()
	if err == nil {
		reach(agentv1.CreateStage_CREATE_STAGE_STARTED)
	}
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyContainer, result.ID)
	m.mu.Lock()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		e.id = result.ID
		m.set(e, eventStarted, func(r *agentv1.SandboxReport) {
			r.StartTime, r.StartPath, r.ContainerId = timestamppb.New(result.StartTime), result.Path, result.ID
		})
		close(e.created)
		m.follow(ctx, e)
		m.mu.Unlock()
		log.Info("sandbox started")
		return
	}
	err = c.cause(ctx, err)
	m.set(e, eventFailed, func(r *agentv1.SandboxReport) {
		r.Reason, r.Message = string(cmp.Or(fault.ReasonOf(err), fault.Internal)), publicMessage(err)
	})
	m.mu.Unlock()
	log.Info("sandbox not created", obs.KeyError, err.Error())
	c.undo(ctx, result, err)
}

// cause returns why a create failed: what ended its context, or else the launch's error. mu is held.
func (c createRun) cause(ctx context.Context, err error) error {
	m, e := c.manager, c.entry
	switch {
	case e.deletion != nil:
		return errTerminating(e.record.GetFence())
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fault.Wrap(err, context.DeadlineExceeded, fault.DeadlineExceeded, "the sandbox was not created within %s", m.config.CreateTimeout)
	case ctx.Err() == nil:
		return err
	case m.gate.closed:
		return errClosing()
	case e.superseded:
		return errSuperseded
	}
	return errAbandoned
}

// undo removes what a failed create left. Callers get their answer after the first attempt; if that failed, it is
// repeated until it succeeds.
func (c createRun) undo(ctx context.Context, result launch.Result, cause error) {
	m, e := c.manager, c.entry
	answer := func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !isClosed(e.created) {
			e.createErr = cause
			close(e.created)
			e.wake()
		}
	}
	err := m.retry(m.life, func() error {
		ctx, cancel := cleanup(ctx)
		defer cancel()
		return m.launcher.Undo(ctx, result)
	}, func(err error) {
		logr.FromContextOrDiscard(ctx).Error(err, "cleaning up failed create", obs.KeyContainer, result.ID)
		answer()
	})
	if err == nil {
		m.remove(ctx, e)
	}
	answer()
}

// stageTimer returns a function that appends a stage to the entry, with the time since the stage before.
func (c createRun) stageTimer() func(agentv1.CreateStage) {
	m, e := c.manager, c.entry
	since := m.clock.Now()
	return func(stage agentv1.CreateStage) {
		now := m.clock.Now()
		m.mu.Lock()
		defer m.mu.Unlock()
		e.reach(StageTiming{stage, now.Sub(since)})
		since = now
	}
}

func stageOf(s runtime.Stage) agentv1.CreateStage {
	switch s {
	case runtime.StageImage:
		return agentv1.CreateStage_CREATE_STAGE_IMAGE
	case runtime.StageSnapshot:
		return agentv1.CreateStage_CREATE_STAGE_SNAPSHOT
	case runtime.StageContainer:
		return agentv1.CreateStage_CREATE_STAGE_CONTAINER
	case runtime.StageTask:
		return agentv1.CreateStage_CREATE_STAGE_TASK
	case runtime.StageClaim:
		return agentv1.CreateStage_CREATE_STAGE_CLAIM
	}
	return agentv1.CreateStage_CREATE_STAGE_UNSPECIFIED
}

// publicMessage returns the part of an error that any caller may see.
func publicMessage(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "internal error"
}
