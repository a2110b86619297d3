// Package sandbox owns the agent's sandboxes: who is admitted, in which order calls on one sandbox are carried out, what
// state each is in, and who is told. It reaches containers only through runtime.Runtime and never speaks gRPC. All
// methods of Manager may be called concurrently.
//
// The states of a sandbox, as reported:
//
//	            admitted                started                process ended
//	(nothing) ----------> CREATING ----------------> RUNNING ----------------> STOPPED
//	     ^                   |  failed, cancelled       | delete                  | delete
//	     |                   v                          v                         |
//	     |                FAILED ------------------> TERMINATING <----------------+
//	     |                   | cleaned up               | removed
//	     +---- TERMINATED <--+--------------------------+
//
// TERMINATED is a last word, not a state that is kept: after it the sandbox is not known, and its place is free.
//
// What is durable, and what is not:
//
//	containers with record, report, persisted   the runtime; Adopt rebuilds all sandboxes from it
//	tombstones of callers, with their request   a file each, from before the container is touched until ForgetTombstone
//	draining                                    a file
//	the highest term of each kind of leader     agent/internal/terms
//	deletes without a tombstone                 memory: the API server knows of the deletion (the custom resource has its
//	                                            deletionTimestamp, or is of a later attempt), so its caller asks again
//	which attempts were deleted                 memory, for an hour: a create that is late is a leader's that still runs,
//	                                            or one of a lower term; neither outlives the agent's restart unnoticed,
//	                                            for the call's connection does not
//	creates that run                            memory: nobody was told of their sandbox, so that Adopt removes the rest
//
// One lock guards it all; it is never held over I/O. The other, settingDrain, comes before it.
package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/logs"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	defaultCreateTimeout = 2 * time.Minute
	defaultGrace         = 10 * time.Second
	cleanupTimeout       = 45 * time.Second
	retryMin, retryMax   = 200 * time.Millisecond, 5 * time.Second
	noCapacityRetry      = time.Second
)

// Config is what a Manager needs.
type Config struct {
	// Runtime runs the containers.
	Runtime runtime.Runtime
	// Logs keeps their output.
	Logs *logs.Store
	// Info tells who the agent is; it is not changed.
	Info *agentv1.AgentInfo
	// State keeps what the runtime cannot: whether the agent is drained. Tombstones keeps a file for each tombstone.
	State, Tombstones Store
	// Slots has the slots that Claimer claims; both are nil where there are none.
	Slots   Slots
	Claimer Claimer
	// CreateTimeout bounds a create, the pull of its image included. Zero: 2 min.
	CreateTimeout time.Duration
	// Clock; nil is the real one.
	Clock clock.WithTicker
}

// Manager keeps the sandboxes of one agent. Make it with New, fill it with Adopt, end it with Close.
type Manager struct {
	config Config
	clock  clock.WithTicker
	// life ends with Close. It is the one context that is kept: work that outlives its caller ends with it.
	life context.Context //nolint:containedctx // see above
	end  context.CancelFunc
	wg   sync.WaitGroup

	settingDrain sync.Mutex // orders the writes of the drain file

	mu         sync.Mutex
	adopted    bool
	closed     bool
	accepting  bool
	notReady   string // why not accepting
	draining   bool
	terms      map[string]int64  // the highest of each role
	sandboxes  map[string]*entry // by sandbox uid: one attempt is in force
	tombstones *tombstones
	graves     map[string]*grave // by sandbox uid
	images     []string          // sorted
	slots      *agentv1.SlotStatus
	watchers   map[*Watcher]struct{}
}

// entry is one sandbox. Its fields are guarded by the manager's lock but for those of the first group.
type entry struct {
	record *agentv1.SandboxRecord
	// id is the container's. A create that takes a slot changes it, under the lock; it is fixed once created is closed.
	id string
	// madeLog is the create's own: it has made the log directory.
	madeLog bool

	// report is replaced, never changed: watchers hold it.
	report *agentv1.SandboxReport
	// changed is closed, and replaced, whenever stages or an outcome change.
	changed chan struct{}

	// The create: its stages, the callers that wait for it, how to cancel it, that it was because its last callers lead no
	// more, and, once created is closed, its outcome.
	stages    []StageTiming
	callers   map[*terms.Caller]struct{}
	cancel    context.CancelFunc
	deposed   bool
	created   chan struct{}
	createErr error

	deletion *deletion
	// ended is closed once the process has ended and all its output is in its log, or the container is gone.
	ended chan struct{}
	// gone is closed once nothing is left of it.
	gone chan struct{}
}

// StageTiming is a stage of a create that was reached, and the time spent in it alone.
type StageTiming struct {
	Stage    agentv1.CreateStage
	Duration time.Duration
}

// New reads the durable state and returns a Manager that takes no calls until Adopt has succeeded.
func New(cfg Config) (*Manager, error) {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	if cfg.CreateTimeout == 0 {
		cfg.CreateTimeout = defaultCreateTimeout
	}
	life, end := context.WithCancel(context.Background())
	m := &Manager{
		config: cfg, clock: cfg.Clock, life: life, end: end, notReady: "the agent is starting", terms: map[string]int64{},
		sandboxes: map[string]*entry{}, watchers: map[*Watcher]struct{}{}, graves: map[string]*grave{},
		tombstones: newTombstones(maxTombstones, tombstoneAge),
	}
	if err := m.load(); err != nil {
		end()
		return nil, err
	}
	return m, nil
}

// Store keeps small files durably; state.Dir is one. Its calls block for the disk.
type Store interface {
	// Names are the files.
	Names() ([]string, error)
	// Read returns a file; nil without an error if there is none.
	Read(name string) ([]byte, error)
	// Write makes or replaces a file; once it has returned, the file is durable.
	Write(name string, data []byte) error
	// Remove removes a file, durably; one that is not there is removed already.
	Remove(name string) error
}

// load reads what an earlier life of the agent wrote down.
func (m *Manager) load() error {
	drained, err := m.config.State.Read(drainFile)
	if err != nil {
		return fmt.Errorf("reading whether the agent is drained: %w", err)
	}
	m.draining = drained != nil
	return m.loadGraves()
}

// Close ends everything that runs: creates are cancelled and cleaned up, deletes are left to whoever repeats them,
// watchers are ended. Sandboxes go on. It waits until all of that is done or ctx ends.
func (m *Manager) Close(ctx context.Context) error {
	m.mu.Lock()
	m.closed = true
	m.dropWatchers(errClosing())
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

func errClosing() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
}

// ready is nil if calls are taken. mu is held.
func (m *Manager) ready() error {
	switch {
	case m.closed:
		return errClosing()
	case !m.adopted:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the agent does not know its sandboxes yet: %s", m.notReady)
	}
	return nil
}

// detach returns a context with ctx's values that ends with the manager, not with ctx.
func (m *Manager) detach(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(m.life, cancel)
	return ctx, func() { stop(); cancel() }
}

// cleanup returns a context for work that must be done whoever leaves, the manager included.
func cleanup(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
}

// checkAgent refuses a fence that names another agent.
func (m *Manager) checkAgent(f *agentv1.Fence) error {
	if own := m.config.Info.GetPodUid(); f.GetAgentUid() != own {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the call is for agent %s, this is agent %s", f.GetAgentUid(), own)
	}
	return nil
}

// find returns the sandbox that a fence names: NotFound if it is not known, FenceMismatch if another attempt is in
// force. mu is held.
func (m *Manager) find(f *agentv1.Fence) (*entry, error) {
	if err := m.checkAgent(f); err != nil {
		return nil, err
	}
	if err := m.ready(); err != nil {
		return nil, err
	}
	e, ok := m.sandboxes[f.GetSandboxUid()]
	if !ok {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "the agent has no sandbox %s", f.GetSandboxUid())
	}
	if in := e.record.GetFence().GetAttempt(); in != f.GetAttempt() {
		return nil, mismatch(f, in)
	}
	return e, nil
}

func mismatch(f *agentv1.Fence, inForce int64) error {
	return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch,
		"the call is for attempt %d of sandbox %s, attempt %d is in force", f.GetAttempt(), f.GetSandboxUid(), inForce)
}

// set changes an entry's report, tells who waits on the entry, and tells watchers. mu is held.
func (m *Manager) set(e *entry, change func(*agentv1.SandboxReport)) {
	report, _ := proto.Clone(e.report).(*agentv1.SandboxReport)
	change(report)
	e.report = report
	e.wake()
	m.publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{report}})
}

// wake tells who waits on the entry. The manager's lock is held.
func (e *entry) wake() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// remove forgets an entry: its last report is TERMINATED. mu is held.
func (m *Manager) remove(e *entry) {
	delete(m.sandboxes, e.record.GetFence().GetSandboxUid())
	m.tellPlaces()
	m.set(e, func(r *agentv1.SandboxReport) { r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED })
	closeOnce(e.ended)
	closeOnce(e.gone)
}

// closeOnce closes a channel that may be closed already; the manager's lock orders the callers.
func closeOnce(ch chan struct{}) {
	select {
	case <-ch:
	default:
		close(ch)
	}
}

// Reports returns all sandboxes, in the order of their container ids.
func (m *Manager) Reports() []*agentv1.SandboxReport {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.reports()
}

func (m *Manager) reports() []*agentv1.SandboxReport {
	out := make([]*agentv1.SandboxReport, 0, len(m.sandboxes))
	for _, e := range m.sandboxes {
		out = append(out, e.report)
	}
	slices.SortFunc(out, func(a, b *agentv1.SandboxReport) int {
		if a.GetContainerId() < b.GetContainerId() {
			return -1
		}
		return 1
	})
	return out
}

// retry calls try until it succeeds, returning an error only when ctx ends. failed is told of each failure.
func (m *Manager) retry(ctx context.Context, try func() error, failed func(error)) error {
	for wait := retryMin; ; wait = min(2*wait, retryMax) {
		err := try()
		if err == nil {
			return nil
		}
		failed(err)
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-m.clock.After(wait):
		}
	}
}
