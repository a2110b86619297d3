package sandbox

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// killDelay is how long the end of a process that was killed waits to be recorded. A kubelet that deletes the agent's Pod kills all processes in
// the Pod's cgroup, one after another: a sandbox that ends with its agent has not failed.
const killDelay = 500 * time.Millisecond

// finishTimeout is how long an ended sandbox is reported as running while its exit cannot be made durable.
const finishTimeout = 5 * time.Second

// follower waits for the end of one sandbox's process.
type follower struct {
	manager *Manager
	entry   *entry
}

// follow begins to wait for the end of an entry's process. mu is held.
func (m *Manager) follow(ctx context.Context, e *entry) {
	detached, release := m.detach(ctx)
	detached, cancel := context.WithCancel(detached)
	m.wg.Go(func() {
		defer release()
		defer cancel()
		follower{m, e}.watch(detached)
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

// watch waits for the end of the process and records it.
func (f follower) watch(ctx context.Context) {
	m, e := f.manager, f.entry
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyContainer, e.id)
	describe := func(r *agentv1.SandboxReport) { describeLost(r, m.clock.Now()) }
	err := m.retry(ctx, func() error {
		exit, err := m.config.Runtime.Wait(ctx, e.id)
		if errdefs.IsNotFound(err) {
			return nil
		}
		if err == nil {
			describe = m.describe(e, exit)
			f.awaitOwnEnd(ctx, exit)
		}
		return err
	}, func(err error) {
		if ctx.Err() == nil {
			log.V(2).Info("waiting for sandbox failed; will retry", obs.KeyError, err.Error())
		}
	})
	f.ending(context.WithoutCancel(ctx))
	if err != nil {
		return // the agent is stopping, or the sandbox is gone
	}
	f.record(ctx, describe, log)
}

// ending calls what the configuration has for the end of a process.
func (f follower) ending(ctx context.Context) {
	m, e := f.manager, f.entry
	if m.config.Ending == nil {
		return
	}
	m.mu.Lock()
	s := e.started()
	m.mu.Unlock()
	m.config.Ending(ctx, s)
}

// awaitOwnEnd waits for killDelay if a process was killed by someone else.
func (f follower) awaitOwnEnd(ctx context.Context, exit runtime.Exit) {
	m, e := f.manager, f.entry
	m.mu.Lock()
	deleting := e.deletion != nil
	m.mu.Unlock()
	if exit.Code != 128+int32(syscall.SIGKILL) || exit.OOMKilled || exit.RuntimeLost || deleting {
		return
	}
	select {
	case <-ctx.Done():
	case <-m.clock.After(killDelay):
	}
}

// record makes the end of a process durable and reports it. The capacity unit and the ports are free from then on.
func (f follower) record(ctx context.Context, describe func(*agentv1.SandboxReport), log logr.Logger) {
	m, e := f.manager, f.entry
	m.mu.Lock()
	final, _ := proto.Clone(e.report).(*agentv1.SandboxReport)
	m.mu.Unlock()
	describe(final)
	if err := f.finish(ctx, final); err != nil {
		if ctx.Err() != nil {
			return
		}
		log.Error(err, "keeping the exit of sandbox")
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if isClosed(e.gone) {
		return
	}
	closeOnce(e.ended)
	m.set(e, eventEnded, describe)
	m.updateRoom()
	log.Info("sandbox ended", obs.KeyExitCode, final.GetExitCode(), obs.KeyReason, final.GetReason())
}

// finish makes the exit durable, after which the log is complete. It retries for a while, and gives up when a delete comes.
func (f follower) finish(ctx context.Context, final *agentv1.SandboxReport) error {
	m, e := f.manager, f.entry
	kept, _ := proto.Clone(final).(*agentv1.SandboxReport)
	kept.State, kept.Record = stateStopped, nil // the record is kept beside it
	raw, err := anypb.New(kept)
	if err != nil {
		return fmt.Errorf("encoding the report of %s: %w", e.id, err)
	}
	ctx, cancel := context.WithTimeout(ctx, finishTimeout)
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

// describe returns a function that fills in how a process ended.
func (m *Manager) describe(e *entry, exit runtime.Exit) func(*agentv1.SandboxReport) {
	m.mu.Lock()
	defer m.mu.Unlock()
	why := e.ending
	return func(r *agentv1.SandboxReport) {
		describeExit(r, exit)
		if why != nil {
			r.Reason, r.Message = why.reason, why.message
		}
	}
}

// describeExit fills in how a process ended.
func describeExit(r *agentv1.SandboxReport, exit runtime.Exit) {
	r.ExitCode, r.FinishTime = &exit.Code, timestamppb.New(exit.At)
	switch {
	case exit.RuntimeLost:
		r.Reason, r.Message = lifecycle.ReasonRuntimeLost, "the shim that ran the process has ended, and the process with it"
	case exit.OOMKilled:
		r.Reason, r.Message = lifecycle.ReasonOOMKilled, "the process was killed because the sandbox was out of memory"
	case exit.Code == 0:
		r.Reason, r.Message = lifecycle.ReasonCompleted, "the process ended"
	default:
		r.Reason, r.Message = lifecycle.ReasonError, fmt.Sprintf("the process ended with exit code %d", exit.Code)
	}
}

// describeLost fills in the end of a process that is gone without an exit code: its shim was killed, or its node or its containerd restarted.
func describeLost(r *agentv1.SandboxReport, now time.Time) {
	r.Reason, r.Message = lifecycle.ReasonRuntimeLost, "the process is gone and its exit code is unknown; its shim was killed or the node restarted"
	r.FinishTime = timestamppb.New(now)
}
