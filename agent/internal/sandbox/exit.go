package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Reasons of ended processes.
const (
	reasonCompleted = "Completed"
	reasonError     = "Error"
	reasonOOMKilled = "OOMKilled"
)

// finishPatience is how long an ended sandbox is reported as running while its end cannot be written down.
const finishPatience = 5 * time.Second

// follow begins to wait for the end of an entry's process. mu is held.
func (m *Manager) follow(ctx context.Context, e *entry) {
	detached, release := m.detach(ctx)
	detached, cancel := context.WithCancel(detached)
	m.wg.Go(func() {
		defer release()
		defer cancel()
		m.watchExit(detached, e)
	})
	m.wg.Go(func() {
		// The wait ends with the entry, whatever the runtime does.
		select {
		case <-e.gone:
		case <-e.ended:
		case <-detached.Done():
		}
		cancel()
	})
}

func (m *Manager) watchExit(ctx context.Context, e *entry) {
	log := logr.FromContextOrDiscard(ctx).WithValues("container", e.id)
	var exit runtime.Exit
	lost := false
	err := m.retry(ctx, func() error {
		var err error
		exit, err = m.config.Runtime.Wait(ctx, e.id)
		if errdefs.IsNotFound(err) {
			lost = true
			return nil
		}
		return err
	}, func(err error) {
		if ctx.Err() == nil {
			log.V(2).Info("waiting for a sandbox; trying on", "err", err.Error())
		}
	})
	if err != nil {
		return // the agent is stopping, or the sandbox is gone
	}
	m.settleExit(ctx, e, func(r *agentv1.SandboxReport) {
		if lost {
			describeLost(r, m.clock.Now())
			return
		}
		describeExit(r, exit)
	}, log)
}

// settleExit writes the end of a process down and reports it.
func (m *Manager) settleExit(ctx context.Context, e *entry, describe func(*agentv1.SandboxReport), log logr.Logger) {
	m.mu.Lock()
	final, _ := proto.Clone(e.report).(*agentv1.SandboxReport)
	deleting := e.deletion != nil
	m.mu.Unlock()
	describe(final)
	if !deleting {
		if err := m.finish(ctx, e, final); err != nil {
			if ctx.Err() != nil {
				return
			}
			log.Error(err, "keeping the end of a sandbox")
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if isClosed(e.gone) {
		return
	}
	m.set(e, func(r *agentv1.SandboxReport) {
		state := r.GetState()
		describe(r)
		if e.deletion != nil {
			r.State = state
		}
	})
	closeOnce(e.ended)
	log.Info("sandbox ended", "exitCode", final.GetExitCode(), "reason", final.GetReason())
}

// finish makes the end durable, after which the log has all. It tries for a while and goes on if a delete comes.
func (m *Manager) finish(ctx context.Context, e *entry, final *agentv1.SandboxReport) error {
	kept, _ := proto.Clone(final).(*agentv1.SandboxReport)
	kept.Record = nil // it is kept beside it
	raw, err := anypb.New(kept)
	if err != nil {
		return fmt.Errorf("encoding the report of %s: %w", e.id, err)
	}
	ctx, cancel := context.WithTimeout(ctx, finishPatience)
	defer cancel()
	return m.retry(ctx, func() error {
		m.mu.Lock()
		deleting := e.deletion != nil
		m.mu.Unlock()
		if deleting {
			return nil
		}
		err := m.config.Runtime.Finish(ctx, e.id, raw)
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	}, func(error) {})
}

func describeExit(r *agentv1.SandboxReport, exit runtime.Exit) {
	r.State = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	r.ExitCode, r.FinishTime = &exit.Code, timestamppb.New(exit.At)
	switch {
	case exit.OOMKilled:
		r.Reason, r.Message = reasonOOMKilled, "the process was killed because the sandbox was out of memory"
	case exit.Code == 0:
		r.Reason, r.Message = reasonCompleted, "the process ended"
	default:
		r.Reason, r.Message = reasonError, fmt.Sprintf("the process ended with exit code %d", exit.Code)
	}
}

// describeLost is for a process that is gone without an exit code: its node or its containerd was restarted.
func describeLost(r *agentv1.SandboxReport, now time.Time) {
	r.State = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	r.Reason, r.Message = reasonError, "the process is gone and nobody knows its exit code; the node was probably restarted"
	r.FinishTime = timestamppb.New(now)
}
