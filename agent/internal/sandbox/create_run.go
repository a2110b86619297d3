package sandbox

import (
	"cmp"
	"context"
	"errors"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// abandonTimeout is how long a launch may run after its context has ended: longer than any call that it waits for all the same,
// and shorter than its last caller waits for it.
const abandonTimeout = 40 * time.Second

// errStuck is why an abandoned create has no other cause.
var errStuck = errors.New("the launch does not return")

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
	launched = sync.OnceFunc(launched)
	returned := make(chan struct{})
	m.wg.Go(func() { c.bound(ctx, returned, launched) })
	result, err := m.launcher.Launch(ctx, e.record, persisted, func(s runtime.Stage) { reach(stageOf(s)) })
	close(returned)
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
	if !isClosed(e.created) { // else it was abandoned
		c.fail(err)
	}
	m.mu.Unlock()
	log.Info("sandbox not created", obs.KeyError, err.Error())
	c.undo(ctx, result, err)
}

// bound abandons a create whose launch has not returned for abandonTimeout after its context ended. Its callers get their answer,
// and the sandbox, which is reported as FAILED, gives up its capacity unit and its ports. What the launch leaves is removed when
// it returns; until then no other attempt of the sandbox is admitted.
func (c createRun) bound(ctx context.Context, returned <-chan struct{}, launched func()) {
	m, e := c.manager, c.entry
	select {
	case <-returned:
		return
	case <-ctx.Done():
	}
	select {
	case <-returned:
		return
	case <-m.clock.After(abandonTimeout):
	}
	launched()
	m.mu.Lock()
	defer m.mu.Unlock()
	if isClosed(e.created) {
		return
	}
	err := c.cause(ctx, errStuck)
	closeOnce(e.ended)
	m.updateRoom()
	c.fail(err)
	c.answer(err)
	logr.FromContextOrDiscard(ctx).Error(err, "abandoning create that does not return", obs.KeySandbox, e.name())
}

// fail reports why the create failed. mu is held.
func (c createRun) fail(cause error) {
	c.manager.set(c.entry, eventFailed, func(r *agentv1.SandboxReport) {
		r.Reason, r.Message = string(cmp.Or(fault.ReasonOf(cause), fault.Internal)), publicMessage(cause)
		if isClosed(c.entry.ended) { // a reader of the report sees, in any state, that it holds nothing
			r.FinishTime = timestamppb.New(c.manager.clock.Now())
		}
	})
}

// answer gives the callers their answer, once. mu is held.
func (c createRun) answer(cause error) {
	e := c.entry
	if !isClosed(e.created) {
		e.createErr = cause
		close(e.created)
		e.wake()
	}
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
		c.answer(cause)
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
