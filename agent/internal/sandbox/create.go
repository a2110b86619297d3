package sandbox

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// errAbandoned is the outcome of a create whose callers have all left. It says nothing about the request: a caller that
// asks again gets a new create.
var errAbandoned = fault.New(context.Canceled, fault.Cancelled, "the create was canceled: its callers have left")

// errSuperseded is errAbandoned because of a new leader.
var errSuperseded = fault.Wrap(errAbandoned, context.Canceled, fault.LeaderSuperseded, "the create was canceled: its caller lost leadership")

// stageDelay is how long a stage waits for later ones to be sent together with it: each message wakes its readers on cores
// that a fast create can use better.
const stageDelay = 20 * time.Millisecond

// Create runs a sandbox and returns its report once the process has started. reached is called from this goroutine for
// each stage. Repeating it with the same record joins the create that runs, or returns at once. The create is canceled
// when all its callers have left, or were superseded, before it started the process. After an error nothing of the sandbox
// is left, unless the runtime could not be reached; what is left then is removed when it can be.
func (m *Manager) Create(ctx context.Context, record *agentv1.SandboxRecord, persisted bool, reached func(StageTiming)) (*agentv1.SandboxReport, error) {
	if err := m.validate(record); err != nil {
		return nil, err
	}
	caller, err := callerOf(ctx)
	if err != nil {
		return nil, err
	}
	for {
		m.mu.Lock()
		a := m.admit(ctx, caller, record, persisted)
		if a.entry != nil {
			a.entry.callers[caller] = struct{}{}
		}
		m.mu.Unlock()
		wait := a.wait
		switch {
		case a.refused != nil:
			return nil, a.refused
		case a.entry != nil:
			report, err := m.awaitCreate(ctx, a.entry, caller, reached)
			if !errors.Is(err, errAbandoned) || ctx.Err() != nil {
				return report, err
			}
			// The create was canceled by its last caller at the moment when this one joined, or for all of them by a new
			// leader. Create again, if that leader is this caller's.
			wait = a.entry.gone
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-wait:
		}
	}
}

// awaitCreate waits for a create and passes its stages on.
func (m *Manager) awaitCreate(ctx context.Context, e *entry, caller *terms.Caller, reached func(StageTiming)) (*agentv1.SandboxReport, error) {
	passed := 0
	var delay <-chan time.Time // while stages wait to be passed on
	for {
		m.mu.Lock()
		stages, changed, report := e.stages, e.changed, e.report
		over, err := isClosed(e.created), e.createErr
		if over {
			e.leave(caller)
		}
		m.mu.Unlock()
		pass := func() {
			for ; passed < len(stages); passed++ {
				reached(stages[passed])
			}
			delay = nil
		}
		if over {
			pass()
			return report, err
		}
		if delay == nil && passed < len(stages) {
			delay = m.clock.After(stageDelay)
		}
		select {
		case <-ctx.Done():
			m.mu.Lock()
			last := e.leave(caller)
			m.mu.Unlock()
			if last {
				// The work is undone before its last caller gets its answer.
				select {
				case <-e.created:
				case <-m.clock.After(cleanupTimeout):
				}
			}
			return nil, ctx.Err()
		case <-changed:
		case <-delay:
			pass()
		}
	}
}

// begin makes the entry and begins the create. mu is held.
func (m *Manager) begin(ctx context.Context, record *agentv1.SandboxRecord, persisted bool) *entry {
	now := m.clock.Now()
	record, _ = proto.Clone(record).(*agentv1.SandboxRecord)
	if record.GetTraceparent() == "" {
		record.Traceparent = obs.Traceparent(ctx)
	}
	e := newEntry(identity.FenceOf(record.GetFence()).ContainerID(), record, &agentv1.SandboxReport{
		State: stateCreating, Endpoints: endpoints(m.config.Info.GetPodIp(), record), Persisted: persisted,
	})
	e.stages = []StageTiming{{agentv1.CreateStage_CREATE_STAGE_ADMITTED, m.clock.Since(now)}}
	m.sandboxes[e.fence.SandboxUID] = e
	launched := func() {}
	if m.config.Slots != nil {
		launched = m.config.Slots.Begin() // before the room shrinks: one of the slots is this create's
	}
	m.updateRoom()
	m.config.Status.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{e.report}})
	detached, release := m.detach(ctx)
	detached, cancel := context.WithTimeout(detached, m.config.CreateTimeout)
	e.cancel = cancel
	m.wg.Go(func() {
		defer release()
		defer cancel()
		createRun{m, e}.run(detached, persisted, launched)
	})
	return e
}
