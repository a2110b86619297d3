package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Create runs a sandbox and returns its report once the process has started. reached is called from this goroutine for
// each stage. Repeating it with the same record joins the create that runs, or returns at once. The create is cancelled
// when all its callers have left, or were superseded, before it started the process. After an error nothing of the sandbox
// is left, unless the runtime could not be reached, and then it is removed when it can.
func (m *Manager) Create(ctx context.Context, record *agentv1.SandboxRecord, persisted bool, reached func(StageTiming)) (*agentv1.SandboxReport, error) {
	if err := validate(record); err != nil {
		return nil, err
	}
	caller, err := callerOf(ctx)
	if err != nil {
		return nil, err
	}
	for {
		m.mu.Lock()
		e, wait, err := m.admit(ctx, caller, record, persisted)
		if e != nil {
			e.callers[caller] = struct{}{}
		}
		m.mu.Unlock()
		switch {
		case err != nil:
			return nil, err
		case e != nil:
			report, err := m.await(ctx, e, caller, reached)
			if !errors.Is(err, errAbandoned) || ctx.Err() != nil {
				return report, err
			}
			// It was given up by its last caller in the moment in which this one joined, or by all of them because of a new
			// leader: begin anew, if that leader is this caller's.
			wait = e.gone
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-wait:
		}
	}
}

// errAbandoned is the outcome of a create whose callers have all left, or were superseded. It says nothing of the request:
// whoever asks again gets it begun anew.
var errAbandoned = fault.New(context.Canceled, fault.Cancelled, "the create was cancelled: nobody waits for it any more")

// errDeposed is errAbandoned because of a new leader.
var errDeposed = fault.Wrap(errAbandoned, context.Canceled, fault.LeaderSuperseded, "the create was cancelled: its caller leads no more")

// stagePatience is how long a stage waits for those after it to be told with it: each message wakes its readers on cores
// that a fast create can use better.
const stagePatience = 20 * time.Millisecond

// await waits for a create that somebody runs.
func (m *Manager) await(ctx context.Context, e *entry, caller *terms.Caller, reached func(StageTiming)) (*agentv1.SandboxReport, error) {
	told := 0
	var patience <-chan time.Time // while there are stages to tell
	for {
		m.mu.Lock()
		stages, changed, report := e.stages, e.changed, e.report
		over, err := isClosed(e.created), e.createErr
		m.mu.Unlock()
		tell := func() {
			for ; told < len(stages); told++ {
				reached(stages[told])
			}
			patience = nil
		}
		if over {
			tell()
			m.leave(e, caller)
			return report, err
		}
		if patience == nil && told < len(stages) {
			patience = m.clock.After(stagePatience)
		}
		select {
		case <-ctx.Done():
			if m.leave(e, caller) {
				// The work is undone before its last caller is told that it is.
				select {
				case <-e.created:
				case <-m.clock.After(cleanupTimeout):
				}
			}
			return nil, ctx.Err()
		case <-changed:
		case <-patience:
			tell()
		}
	}
}

// leave forgets a caller, and cancels a create that nobody waits for any more; it tells whether it did.
func (m *Manager) leave(e *entry, caller *terms.Caller) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(e.callers, caller)
	if len(e.callers) > 0 || isClosed(e.created) {
		return false
	}
	e.cancel()
	return true
}

// take makes the entry and begins the create. mu is held.
func (m *Manager) take(ctx context.Context, record *agentv1.SandboxRecord, persisted bool) *entry {
	now := m.clock.Now()
	record, _ = proto.Clone(record).(*agentv1.SandboxRecord)
	if record.GetTraceparent() == "" {
		record.Traceparent = obs.Traceparent(ctx)
	}
	e := newEntry(containerID(record.GetFence()), record, &agentv1.SandboxReport{
		Record: record, State: agentv1.SandboxState_SANDBOX_STATE_CREATING, Endpoints: m.endpoints(record), Persisted: persisted,
	})
	e.stages = []StageTiming{{agentv1.CreateStage_CREATE_STAGE_ADMITTED, m.clock.Since(now)}}
	m.sandboxes[record.GetFence().GetSandboxUid()] = e
	built := func() {}
	if m.config.Slots != nil {
		built = m.config.Slots.Begin() // before the slots hear that there is a place less: one of them is this create's
	}
	m.tellPlaces()
	m.publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{e.report}})
	detached, release := m.detach(ctx)
	detached, e.cancel = context.WithTimeout(detached, m.config.CreateTimeout)
	m.wg.Go(func() {
		defer release()
		defer e.cancel()
		m.runCreate(detached, e, built)
	})
	return e
}

func newEntry(id string, record *agentv1.SandboxRecord, report *agentv1.SandboxReport) *entry {
	report.ContainerId = id
	return &entry{
		record: record, id: id, report: report, cancel: func() {}, changed: make(chan struct{}),
		callers: map[*terms.Caller]struct{}{}, created: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
	}
}

func containerID(f *agentv1.Fence) string {
	return identity.Identity{SandboxUID: f.GetSandboxUid(), Attempt: f.GetAttempt()}.ContainerID()
}

func (m *Manager) endpoints(record *agentv1.SandboxRecord) []string {
	if network(record) == runtime.NetworkNone {
		return nil
	}
	var out []string
	for _, port := range record.GetSpec().GetPorts() {
		out = append(out, net.JoinHostPort(m.config.Info.GetPodIp(), strconv.Itoa(int(port))))
	}
	return out
}

// runCreate builds the sandbox; the outcome is settled under the lock, so that a caller's leaving or a delete that comes
// at the same moment either finds it started or makes it fail.
// built is called when it needs no slot any more.
func (m *Manager) runCreate(ctx context.Context, e *entry, built func()) {
	log := logr.FromContextOrDiscard(ctx).WithValues("sandbox", e.record.GetNamespace()+"/"+e.record.GetName())
	err := m.build(ctx, e)
	built()
	log = log.WithValues("container", e.id)
	m.mu.Lock()
	if err == nil {
		err = ctx.Err()
	}
	if err == nil {
		m.set(e, func(r *agentv1.SandboxReport) { r.State = agentv1.SandboxState_SANDBOX_STATE_RUNNING })
		close(e.created)
		m.follow(ctx, e)
		m.mu.Unlock()
		log.Info("sandbox started")
		return
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fault.Wrap(err, context.DeadlineExceeded, fault.DeadlineExceeded, "the sandbox was not created within %s", m.config.CreateTimeout)
	} else if m.closed && ctx.Err() != nil {
		err = errClosing()
	} else if ctx.Err() != nil {
		err = errAbandoned
		if e.deposed {
			err = errDeposed
		}
	}
	if e.deletion != nil {
		err = errTerminating(e.record.GetFence())
	}
	m.set(e, func(r *agentv1.SandboxReport) {
		r.Reason, r.Message = string(cmp.Or(fault.ReasonOf(err), fault.Internal)), publicMessage(err)
		if e.deletion == nil {
			r.State = agentv1.SandboxState_SANDBOX_STATE_FAILED
		}
	})
	m.mu.Unlock()
	log.Info("sandbox not created", "err", err.Error())
	m.undo(ctx, e, err, log)
}

// undo removes what a failed create left. Callers are told after the first try; if that failed, tries go on.
func (m *Manager) undo(ctx context.Context, e *entry, cause error, log logr.Logger) {
	settled := false
	settle := func() {
		if !settled {
			settled = true
			m.mu.Lock()
			e.createErr = cause
			close(e.created)
			e.wake()
			m.mu.Unlock()
		}
	}
	remove := func() error {
		ctx, cancel := cleanup(ctx)
		defer cancel()
		// What exists already is another agent's, and not ours to remove.
		if e.madeLog && !errdefs.IsAlreadyExists(cause) {
			m.config.Logs.Release(e.id) // whose directory the runtime removes
			if err := m.config.Runtime.Delete(ctx, e.id); err != nil {
				return err
			}
		}
		if e.madeLog {
			return m.config.Logs.Remove(e.id)
		}
		return nil
	}
	err := m.retry(m.life, remove, func(err error) {
		log.Error(err, "cleaning up after a failed create")
		settle()
	})
	if err == nil {
		m.forget(e, log)
	}
	settle()
}

// build makes log, container and process, by a slot if one is to be had, and notes the start.
func (m *Manager) build(ctx context.Context, e *entry) error {
	since := m.clock.Now()
	reach := func(stage agentv1.CreateStage) {
		now := m.clock.Now()
		m.mu.Lock()
		e.stages = append(e.stages, StageTiming{stage, now.Sub(since)})
		e.wake()
		m.mu.Unlock()
		since = now
	}
	reached := func(s runtime.Stage) { reach(stageOf(s)) }
	path := sandboxv1.StartPath_START_PATH_SLOT
	started, err := m.claim(ctx, e, reached)
	if errors.Is(err, errNoSlot) {
		path = sandboxv1.StartPath_START_PATH_COLD
		started, err = m.start(ctx, e, reached)
	}
	if err != nil {
		return err
	}
	m.mu.Lock()
	report, _ := proto.Clone(e.report).(*agentv1.SandboxReport)
	report.StartTime, report.StartPath, report.ContainerId = timestamppb.New(started), path, e.id
	e.report = report
	m.mu.Unlock()
	reach(agentv1.CreateStage_CREATE_STAGE_STARTED)
	return nil
}

// start makes and starts a container of its own, and returns when its process was started.
func (m *Manager) start(ctx context.Context, e *entry, reached func(runtime.Stage)) (time.Time, error) {
	paths, err := m.config.Logs.Create(e.id, e.record.GetName())
	if errdefs.IsAlreadyExists(err) {
		return time.Time{}, errForeign(err, e.id)
	}
	if err != nil {
		return time.Time{}, err
	}
	e.madeLog = true
	c, err := m.container(e, paths)
	if err == nil {
		err = m.config.Runtime.Create(ctx, c, reached)
	}
	if errdefs.IsAlreadyExists(err) {
		return time.Time{}, errForeign(err, e.id)
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return time.Time{}, err
	}
	started := m.clock.Now()
	if err := m.config.Runtime.Start(ctx, e.id); err != nil {
		return time.Time{}, err
	}
	return started, m.config.Logs.MarkStarted(e.id, started)
}

// container says what to run.
func (m *Manager) container(e *entry, paths logs.Paths) (runtime.Container, error) {
	r := e.record
	record, err := anypb.New(r)
	if err != nil {
		return runtime.Container{}, fmt.Errorf("encoding the record of %s: %w", e.id, err)
	}
	m.mu.Lock()
	persisted := e.report.GetPersisted()
	m.mu.Unlock()
	env := maps.Clone(r.GetSpec().GetEnv())
	if tp := r.GetTraceparent(); tp != "" {
		if env == nil {
			env = map[string]string{}
		}
		env["TRACEPARENT"] = tp
	}
	return runtime.Container{
		ID: e.id, Record: record, Image: r.GetSpec().GetImage(), Command: r.GetSpec().GetCommand(), Args: r.GetSpec().GetArgs(),
		Env: env, WorkingDir: r.GetSpec().GetWorkingDir(), Hostname: r.GetName(), Limits: limits(r), Network: network(r),
		LogPath: paths.Output, HostnamePath: paths.Hostname,
		Labels: identity.Identity{
			Namespace: r.GetNamespace(), Name: r.GetName(), SandboxUID: r.GetFence().GetSandboxUid(), Attempt: r.GetFence().GetAttempt(),
			AgentUID: r.GetFence().GetAgentUid(), Pool: m.config.Info.GetPool(), State: identity.StateClaimed, Persisted: persisted,
		}.Labels(),
	}, nil
}

func errForeign(err error, id string) error {
	return fault.Wrap(err, errdefs.ErrAlreadyExists, fault.SandboxExists, "container %s exists on the node and is another agent's", id)
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

// publicMessage is what may be told to anyone of an error.
func publicMessage(err error) string {
	var f *fault.Error
	if errors.As(err, &f) {
		return f.Message()
	}
	return "internal error"
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}
