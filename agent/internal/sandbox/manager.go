// Package sandbox owns an agent's sandboxes: which creates are admitted, in which order calls on one sandbox are carried
// out, and the state that each sandbox is in. It reaches containers only through runtime.Runtime and never speaks gRPC. All
// methods of Manager may be called concurrently.
//
// The states of a sandbox, as reported (state.go has the transitions):
//
//	            admitted                started                process ended
//	(nothing) ----------> CREATING ----------------> RUNNING ----------------> STOPPED
//	     ^                   |  failed, canceled       | delete                  | delete
//	     |                   v                          v                         |
//	     |                FAILED ------------------> TERMINATING <----------------+
//	     |                   | cleaned up               | removed
//	     +---- TERMINATED <--+--------------------------+
//
// TERMINATED is reported once, as the last state; after it the sandbox is not known. A sandbox holds a capacity unit and its
// ports until its process has ended: a STOPPED one holds neither. A FAILED one does until it is cleaned up, or until its create
// was abandoned, because it did not return after its deadline.
//
// What is durable, and what is not:
//
//	containers with record, report, persisted   the runtime; Adopt rebuilds all sandboxes from it
//	tombstones                                  agent/internal/tombstone, a file each, from before the container is touched
//	                                            until ForgetTombstone
//	draining                                    a file
//	the highest term of each kind of leader     agent/internal/terms
//	deletes without a tombstone                 memory: the API server knows of the deletion (the custom resource has its
//	                                            deletionTimestamp, or is of a later attempt), so the caller repeats it
//	which attempts were deleted                 memory, for an hour: a create that comes late is from a leader that still
//	                                            runs, or carries a lower term; the restart ends its connection
//	creates that run                            memory: no caller has an answer yet, so Adopt removes what they left
//
// Lock order: settingDrain, then the turn on a tombstone, then Manager.mu, then the locks of tombstone.Store, slot.Pool and
// status.Hub. None of these but settingDrain and the turn is held over I/O.
package sandbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/launch"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/status"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/tombstone"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/resources"
)

const (
	defaultCreateTimeout = 2 * time.Minute
	defaultGrace         = 10 * time.Second
	cleanupTimeout       = 45 * time.Second
	noCapacityRetry      = time.Second
)

// retries is the policy of calls to the runtime that are repeated until they succeed.
var retries = backoff.Policy{Initial: 200 * time.Millisecond, Max: 5 * time.Second}

// Slots keeps containers that were started ahead of time. slot.Pool implements it. Its methods return at once and call
// nothing of the Manager.
type Slots interface {
	launch.Slots
	// SetRoom sets how many more sandboxes fit on the agent.
	SetRoom(n int)
	// Begin notes that a create runs, which may take a slot, until done is called.
	Begin() (done func())
}

// Files keeps small files durably; state.Dir implements it.
type Files = tombstone.Files

// Config is what a Manager needs.
type Config struct {
	// Runtime runs the containers.
	Runtime runtime.Runtime
	// Logs keeps their output.
	Logs *logs.Store
	// Info is the agent's identity and capacity. It does not change.
	Info *agentv1.AgentInfo
	// Process identifies this process of the agent; its containers carry it, so that RemoveLate knows those of an earlier one.
	Process string
	// Status receives every change. The Manager opens it once it knows its sandboxes and closes it in the end.
	Status *status.Hub
	// State keeps whether the agent is drained; Tombstones keeps a file for each tombstone.
	State, Tombstones Files
	// Slots has the slots that Claimer claims; both are nil if there are none.
	Slots   Slots
	Claimer launch.Claimer
	// MaxLimits are the largest limits that a sandbox of the pool may have; zero is none.
	MaxLimits resources.Limits
	// CreateTimeout bounds a create, the pull of its image included. Zero: 2 min.
	CreateTimeout time.Duration
	// Ending is called once the process of a sandbox is no longer followed. If it has ended by then, its container usually still exists. Nil: nothing
	// is to be done. Its context does not end.
	Ending func(ctx context.Context, s Started)
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Manager keeps the sandboxes of one agent. Make it with New, fill it with Adopt, end it with Close.
type Manager struct {
	config     Config
	clock      clock.WithTicker
	launcher   *launch.Launcher
	tombstones *tombstone.Store
	// life ends with Close. It is the one context that is kept: work that outlives its caller ends with it.
	life context.Context //nolint:containedctx // see above
	end  context.CancelFunc
	wg   sync.WaitGroup

	settingDrain sync.Mutex // orders the writes of the drain file

	mu        sync.Mutex
	gate      gate
	leaders   leaders
	sandboxes table
	// removingLate has the containers that RemoveLate removes, by id; the channels are closed when it is done with them.
	removingLate map[string]<-chan struct{}
}

// New reads the durable state and returns a Manager that takes no calls until Adopt has succeeded.
func New(cfg Config) (*Manager, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.CreateTimeout == 0 {
		cfg.CreateTimeout = defaultCreateTimeout
	}
	drained, err := cfg.State.Read(drainFile)
	if err != nil {
		return nil, fmt.Errorf("reading whether the agent is drained: %w", err)
	}
	tombstones, err := tombstone.Open(cfg.Tombstones, cfg.Clock, cfg.Status.Publish)
	if err != nil {
		return nil, err
	}
	lc := launch.Config{Runtime: cfg.Runtime, Logs: cfg.Logs, Pool: cfg.Info.GetPool(), Process: cfg.Process, MaxLimits: cfg.MaxLimits, Clock: cfg.Clock}
	if cfg.Slots != nil {
		lc.Slots, lc.Claimer = cfg.Slots, cfg.Claimer
	}
	m := &Manager{
		config: cfg, clock: cfg.Clock, launcher: launch.New(lc), tombstones: tombstones,
		gate:    gate{notReady: "the agent is starting", draining: drained != nil},
		leaders: leaders{}, sandboxes: table{}, removingLate: map[string]<-chan struct{}{},
	}
	m.life, m.end = context.WithCancel(context.Background())
	cfg.Status.Close(m.gate.ready())
	m.publishAccepting()
	return m, nil
}

// Close ends all work: creates are canceled and cleaned up, deletes are left to the callers that repeat them or to the
// tombstones, watches are ended. Sandboxes run on. It waits until all of that is done or ctx ends.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.gate.closed = true
	m.config.Status.Close(errClosing())
	m.mu.Unlock()
	m.end()
	done := make(chan struct{})
	go func() { defer close(done); m.wg.Wait() }()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// detach returns a context with ctx's values that ends with the manager, not with ctx.
func (m *Manager) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(m.life, cancel)
	return ctx, func() { stop(); cancel() }
}

// cleanup returns a context for work that must be done even when its callers have left or the manager is closed.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
}

// retry repeats call until it succeeds. It returns an error only when ctx ends. failed receives each error.
func (m *Manager) retry(ctx context.Context, call func() error, failed func(error)) error {
	return backoff.Retry(ctx, m.clock, retries, func(context.Context) error {
		err := call()
		if err != nil {
			failed(err)
		}
		return err
	})
}

// CheckAgent refuses a call for another agent than this one.
func (m *Manager) CheckAgent(uid string) error {
	if own := m.config.Info.GetPodUid(); uid != own {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the call is for agent %s, this is agent %s", uid, own)
	}
	return nil
}

// checkCall refuses a call that is for another agent, comes before the agent is ready, or comes from a leader that was
// superseded. mu is held.
func (m *Manager) checkCall(caller *terms.Caller, fence *agentv1.Fence) error {
	if err := m.CheckAgent(fence.GetAgentUid()); err != nil {
		return err
	}
	if err := m.gate.ready(); err != nil {
		return err
	}
	return m.leaders.check(caller)
}

// find returns the sandbox that a fence names: NotFound if it is not known, FenceMismatch if another attempt is in
// force. mu is held.
func (m *Manager) find(f *agentv1.Fence) (*entry, error) {
	if err := m.CheckAgent(f.GetAgentUid()); err != nil {
		return nil, err
	}
	if err := m.gate.ready(); err != nil {
		return nil, err
	}
	e, ok := m.sandboxes[f.GetSandboxUid()]
	if !ok {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "the agent has no sandbox %s", f.GetSandboxUid())
	}
	if e.fence.Attempt != f.GetAttempt() {
		return nil, errMismatch(f, e.fence.Attempt)
	}
	return e, nil
}

func errMismatch(f *agentv1.Fence, inForce int64) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch,
		"the call is for attempt %d of sandbox %s, attempt %d is in force", f.GetAttempt(), f.GetSandboxUid(), inForce)
}

// set applies an event, and a change that comes with it, to an entry, and publishes its report. mu is held.
func (m *Manager) set(e *entry, ev event, change func(*agentv1.SandboxReport)) {
	e.change(func(r *agentv1.SandboxReport) {
		r.State, _ = next(r.GetState(), ev)
		if change != nil {
			change(r)
		}
	})
	m.config.Status.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{e.report}})
}

// remove drops an entry of which nothing is left, after a tombstone that is just being written and together with one that
// was forgotten.
func (m *Manager) remove(ctx context.Context, e *entry) {
	err := m.tombstones.ContainerGone(e.fence.SandboxUID, func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.sandboxes, e.fence.SandboxUID)
		closeOnce(e.ended)
		m.updateRoom()
		m.set(e, eventRemoved, nil)
		close(e.gone)
	})
	if err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "removing forgotten tombstone; the next agent process reports it again")
	}
}

// updateRoom passes the agent's free capacity on to the slots. mu is held.
func (m *Manager) updateRoom() {
	if m.config.Slots == nil {
		return
	}
	n := int(m.config.Info.GetCapacity()) - m.sandboxes.inUse()
	if !m.gate.adopted || m.gate.draining || m.gate.closed {
		n = 0
	}
	m.config.Slots.SetRoom(n)
}
