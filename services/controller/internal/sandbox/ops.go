package sandbox

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// opKind is what an operation asks of an agent.
type opKind string

const (
	opCreate opKind = "create"
	opDelete opKind = "delete"
)

// opKey names an operation on one container.
type opKey struct {
	kind    opKind
	uid     string
	attempt int64
	agent   string
}

// outcome is how far an operation is.
type outcome struct {
	// running: it has not ended yet.
	running bool
	// started is when it began; first when the first operation of its key did.
	started, first time.Time
	// stage is what the agent said last while it runs; empty if it has said nothing yet.
	stage string
	// report is what a create that succeeded says.
	report *agentv1.SandboxReport
	// err is why it failed.
	err error
	// ended is when.
	ended time.Time
}

type operation struct {
	outcome

	cancel context.CancelFunc
}

// memory is what one process remembers of one sandbox. All of it may be lost at any time: it saves work and keeps
// promises of politeness (backoff, exclusion), never correctness.
type memory struct {
	ops map[opKey]*operation
	// first is when an operation was begun for the first time.
	first map[opKey]time.Time
	// trouble is why the last create failed, until one succeeds.
	trouble trouble
	// failures counts creates in a row that failed through no fault of the request.
	failures int
	// excluded are agents that refused, by Pod uid, and until when they are passed over.
	excluded map[string]time.Time
	// doubted is since when the agent has neither been heard of nor answered; zero while it does.
	doubted time.Time
	// held is what may still have a container: the assignment that was seen last, and how long its process may take to end.
	held *held
	// superseded are resource versions that this process has overwritten. A cache that still shows one is behind.
	superseded map[string]bool
}

type held struct {
	v1alpha1.Assignment

	grace time.Duration
}

// trouble is a failure that is not the end.
type trouble struct{ reason, message string }

// operations carries out calls to agents that may take as long as an image's download or a grace period, each in a
// goroutine of its own, so that no reconciler's worker waits. It owns those goroutines: Start waits for them. When one
// ends, its sandbox is reconciled.
type operations struct {
	now    func() time.Time
	notify func(types.NamespacedName)
	wg     sync.WaitGroup
	// life ends with Start.
	life context.Context //nolint:containedctx // of what belongs to no call
	end  context.CancelFunc

	mu      sync.Mutex
	stopped bool
	by      map[types.NamespacedName]*memory
}

func newOperations(now func() time.Time, notify func(types.NamespacedName)) *operations {
	o := &operations{now: now, notify: notify, by: map[types.NamespacedName]*memory{}}
	o.life, o.end = context.WithCancel(context.Background())
	return o
}

// Start waits until ctx ends, then cancels every operation and waits for all of them.
func (o *operations) Start(ctx context.Context) error {
	<-ctx.Done()
	o.mu.Lock()
	o.stopped = true
	o.end()
	for _, m := range o.by {
		for _, op := range m.ops {
			op.cancel()
		}
	}
	o.mu.Unlock()
	o.wg.Wait()
	return nil
}

// NeedLeaderElection is true: only the leader asks agents for anything.
func (o *operations) NeedLeaderElection() bool { return true }

// of returns the memory of a sandbox. o.mu is held.
func (o *operations) of(n types.NamespacedName) *memory {
	m := o.by[n]
	if m == nil {
		m = &memory{ops: map[opKey]*operation{}, first: map[opKey]time.Time{}, excluded: map[string]time.Time{}, superseded: map[string]bool{}}
		o.by[n] = m
	}
	return m
}

// start runs fn as the operation k, unless there is one already. fn's context carries ctx's values and outlives it; it
// ends when the operation is dropped or the process ends. fn tells what it hears.
func (o *operations) start(ctx context.Context, n types.NamespacedName, k opKey, fn func(context.Context, func(stage string)) (*agentv1.SandboxReport, error)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.of(n)
	if m.ops[k] != nil || o.stopped {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	now := o.now()
	if m.first[k].IsZero() {
		m.first[k] = now
	}
	op := &operation{outcome: outcome{running: true, started: now, first: m.first[k]}, cancel: cancel}
	m.ops[k] = op
	heard := func(stage string) {
		o.mu.Lock()
		defer o.mu.Unlock()
		op.stage = stage
	}
	o.wg.Go(func() {
		defer cancel()
		report, err := fn(ctx, heard)
		o.mu.Lock()
		op.running, op.report, op.err, op.ended = false, report, err, o.now()
		o.mu.Unlock()
		o.notify(n)
	})
}

// learn notes how an operation that another process asked for has failed, as if it had been this one's, and returns that.
// What this process has asked for itself stays.
func (o *operations) learn(n types.NamespacedName, k opKey, err error) outcome {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.of(n)
	if op := m.ops[k]; op != nil {
		return op.outcome
	}
	now := o.now()
	if m.first[k].IsZero() {
		m.first[k] = now
	}
	m.ops[k] = &operation{outcome: outcome{started: now, first: m.first[k], err: err, ended: now}, cancel: func() {}}
	return m.ops[k].outcome
}

// look returns how far an operation is; false if there is none.
func (o *operations) look(n types.NamespacedName, k opKey) (outcome, bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		if op := m.ops[k]; op != nil {
			return op.outcome, true
		}
	}
	return outcome{}, false
}

// drop forgets an operation, and cancels it if it is running.
func (o *operations) drop(n types.NamespacedName, k opKey) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		if op := m.ops[k]; op != nil {
			op.cancel()
			delete(m.ops, k)
		}
	}
}

// finish drops an operation of which there will be no other.
func (o *operations) finish(n types.NamespacedName, k opKey) {
	o.drop(n, k)
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		delete(m.first, k)
	}
}

// forget forgets all of a sandbox.
func (o *operations) forget(n types.NamespacedName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		for _, op := range m.ops {
			op.cancel()
		}
		delete(o.by, n)
	}
}

// hold notes the assignment that is in force.
func (o *operations) hold(n types.NamespacedName, a v1alpha1.Assignment, grace time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.of(n); m.held == nil || m.held.Assignment != a || m.held.grace != grace {
		m.held = &held{a, grace}
	}
}

// holds returns what was noted last of a sandbox; nil if that is nothing, or it was forgotten.
func (o *operations) holds(n types.NamespacedName) *held {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		return m.held
	}
	return nil
}

// beside runs fn until it returns or the process ends. It belongs to no sandbox that is there.
func (o *operations) beside(ctx context.Context, fn func(context.Context)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.stopped {
		return
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := context.AfterFunc(o.life, cancel)
	o.wg.Go(func() {
		defer cancel()
		defer ended()
		fn(ctx)
	})
}

// failed counts one more failure of a sandbox's creates and returns their number; succeeded starts over.
func (o *operations) failed(n types.NamespacedName) int {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.of(n)
	m.failures++
	return m.failures
}

func (o *operations) trouble(n types.NamespacedName, why trouble) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.of(n).trouble = why
}

// troubled is why the last create failed; the zero trouble if it did not.
func (o *operations) troubled(n types.NamespacedName) trouble {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		return m.trouble
	}
	return trouble{}
}

func (o *operations) succeeded(n types.NamespacedName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		m.failures, m.trouble = 0, trouble{}
		clear(m.excluded)
	}
}

// exclude passes over an agent for a while; exclusions returns those that are passed over.
func (o *operations) exclude(n types.NamespacedName, agentUID string, until time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.of(n)
	m.excluded[agentUID] = until
	m.failures = 0
}

func (o *operations) exclusions(n types.NamespacedName) []string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var out []string
	if m := o.by[n]; m != nil {
		now := o.now()
		for uid, until := range m.excluded {
			if now.Before(until) {
				out = append(out, uid)
			} else {
				delete(m.excluded, uid)
			}
		}
	}
	return out
}

// behind tells whether a cache that shows the resource version is known to be behind; overwritten adds one that is.
func (o *operations) behind(n types.NamespacedName, version string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.by[n]
	if m == nil {
		return false
	}
	if m.superseded[version] {
		return true
	}
	clear(m.superseded)
	return false
}

func (o *operations) overwritten(n types.NamespacedName, version string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.of(n).superseded[version] = true
}

// doubt notes that the agent does not answer and returns for how long it has not; trust that it does.
func (o *operations) doubt(n types.NamespacedName) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.of(n)
	if m.doubted.IsZero() {
		m.doubted = o.now()
	}
	return o.now().Sub(m.doubted)
}

func (o *operations) trust(n types.NamespacedName) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if m := o.by[n]; m != nil {
		m.doubted = time.Time{}
	}
}
