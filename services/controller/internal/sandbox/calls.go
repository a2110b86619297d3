package sandbox

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// outcome is the state of a call.
type outcome struct {
	// running: it has not ended yet.
	running bool
	// started is when the call was started; first is when the first call on the container was.
	started, first time.Time
	// args identifies the arguments of the call.
	args string
	// stage is the last stage that the agent has reported; empty if it has not answered yet.
	stage string
	// report is the result of a create that succeeded.
	report *agentv1.SandboxReport
	// err is why the call failed.
	err error
	// ended is when it ended.
	ended time.Time
}

// callFunc is a call to an agent. It passes on each stage that the agent reports.
type callFunc func(ctx context.Context, stage func(string)) (*agentv1.SandboxReport, error)

// calls are calls of one kind to agents, one at a time for each container. Each runs in the background, because a download
// or a grace period may take longer than a reconcile should. When a call ends, its sandbox is reconciled.
type calls struct {
	clock      clock.PassiveClock
	background *background
	notify     func(types.NamespacedName)

	mu        sync.Mutex
	sandboxes map[types.NamespacedName]map[identity.Fence]*container
}

// container has the calls on one container.
type container struct {
	first time.Time
	call  *call // nil if it was dropped
}

type call struct {
	outcome

	cancel context.CancelFunc
}

func newCalls(c clock.PassiveClock, b *background, notify func(types.NamespacedName)) *calls {
	return &calls{clock: c, background: b, notify: notify, sandboxes: map[types.NamespacedName]map[identity.Fence]*container{}}
}

// get returns the state of the last call on a container. It reports false if there is none, or if it was dropped.
func (c *calls) get(n types.NamespacedName, f identity.Fence) (outcome, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if x := c.sandboxes[n][f]; x != nil && x.call != nil {
		return x.call.outcome, true
	}
	return outcome{}, false
}

// start starts a call on a container, unless there is one. The call has the values of ctx but outlives it: it ends by itself,
// when it is dropped, or with the process.
func (c *calls) start(ctx context.Context, n types.NamespacedName, f identity.Fence, args string, do callFunc) {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.container(n, f)
	if x.call != nil {
		return
	}
	k := &call{outcome: outcome{running: true, started: c.clock.Now(), first: x.first, args: args}}
	stage := func(s string) {
		c.mu.Lock()
		defer c.mu.Unlock()
		k.stage = s
	}
	cancel, ok := c.background.run(ctx, func(ctx context.Context) {
		report, err := do(ctx, stage)
		c.mu.Lock()
		k.running, k.report, k.err, k.ended = false, report, err, c.clock.Now()
		c.mu.Unlock()
		c.notify(n)
	})
	if ok {
		k.cancel, x.call = cancel, k
	}
}

// recordFailure records the failure of a call that another process has made, as if this process had made it, and returns the
// state of the last call. A call of this process is not replaced.
func (c *calls) recordFailure(n types.NamespacedName, f identity.Fence, err error) outcome {
	c.mu.Lock()
	defer c.mu.Unlock()
	x := c.container(n, f)
	if x.call == nil {
		now := c.clock.Now()
		x.call = &call{outcome: outcome{started: now, first: x.first, err: err, ended: now}, cancel: func() {}}
	}
	return x.call.outcome
}

// drop cancels the call on a container and forgets its outcome, so that another one can be started.
func (c *calls) drop(n types.NamespacedName, f identity.Fence) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if x := c.sandboxes[n][f]; x != nil && x.call != nil {
		x.call.cancel()
		x.call = nil
	}
}

// finish drops the call on a container on which there will be no other one.
func (c *calls) finish(n types.NamespacedName, f identity.Fence) {
	c.drop(n, f)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.sandboxes[n], f)
}

// forget cancels all calls on the containers of a sandbox.
func (c *calls) forget(n types.NamespacedName) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.sandboxes[n] {
		if x.call != nil {
			x.call.cancel()
		}
	}
	delete(c.sandboxes, n)
}

// container returns the entry of a container, which is created if it does not exist. c.mu is held.
func (c *calls) container(n types.NamespacedName, f identity.Fence) *container {
	if c.sandboxes[n] == nil {
		c.sandboxes[n] = map[identity.Fence]*container{}
	}
	x := c.sandboxes[n][f]
	if x == nil {
		x = &container{first: c.clock.Now()}
		c.sandboxes[n][f] = x
	}
	return x
}

// background owns the goroutines of calls. It is a Runnable of the manager.
type background struct {
	life context.Context //nolint:containedctx // the parent of goroutines that belong to no request
	end  context.CancelFunc
	wg   sync.WaitGroup

	mu      sync.Mutex
	stopped bool
}

func newBackground() *background {
	b := &background{}
	b.life, b.end = context.WithCancel(context.Background())
	return b
}

// run calls do in a goroutine, with a context that has the values of ctx and ends when it is canceled or the process ends. It
// reports false if the process is ending already.
func (b *background) run(ctx context.Context, do func(context.Context)) (context.CancelFunc, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped {
		return nil, false
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	detach := context.AfterFunc(b.life, cancel)
	b.wg.Go(func() {
		defer cancel()
		defer detach()
		do(ctx)
	})
	return cancel, true
}

// Start waits until ctx ends, then cancels all goroutines and waits for them. It implements manager.Runnable.
func (b *background) Start(ctx context.Context) error {
	<-ctx.Done()
	b.mu.Lock()
	b.stopped = true
	b.mu.Unlock()
	b.end()
	b.wg.Wait()
	return nil
}

// NeedLeaderElection implements manager.LeaderElectionRunnable: only the leader calls agents.
func (b *background) NeedLeaderElection() bool { return true }
