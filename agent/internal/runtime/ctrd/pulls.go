package ctrd

import (
	"context"
	"sync"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

// pulls shares the work of concurrent pulls of one image. A pull is canceled when the last caller that waits for it has
// left.
type pulls struct {
	run func(ctx context.Context, name string, progress func(runtime.Progress)) error

	wg      sync.WaitGroup
	mu      sync.Mutex
	running map[string]*flight
}

type flight struct {
	cancel  context.CancelFunc
	done    chan struct{}
	err     error // valid once done is closed
	waiters map[int]func(runtime.Progress)
	next    int
	last    runtime.Progress
}

func newPulls(run func(context.Context, string, func(runtime.Progress)) error) *pulls {
	return &pulls{run: run, running: map[string]*flight{}}
}

// do joins the pull of name, or begins it, and waits until it or ctx ends.
func (p *pulls) do(ctx context.Context, name string, progress func(runtime.Progress)) error {
	for {
		f, waiter := p.join(ctx, name, progress)
		select {
		case <-ctx.Done():
		case <-f.done:
		}
		p.leave(name, f, waiter)
		select {
		case <-f.done:
		default:
			return ctx.Err()
		}
		// A pull that its last caller has just left ends as canceled. A caller that joined it at that moment begins another.
		if f.err == nil || ctx.Err() != nil || !isCanceled(f.err) {
			return f.err
		}
	}
}

func (p *pulls) join(ctx context.Context, name string, progress func(runtime.Progress)) (*flight, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, ok := p.running[name]
	if !ok {
		// The first caller's context gives the values (the trace), not the cancellation.
		fctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		f = &flight{cancel: cancel, done: make(chan struct{}), waiters: map[int]func(runtime.Progress){}}
		p.running[name] = f
		p.wg.Go(func() {
			defer cancel()
			err := p.run(fctx, name, func(pr runtime.Progress) { p.report(f, pr) })
			p.mu.Lock()
			f.err = err
			if p.running[name] == f {
				delete(p.running, name)
			}
			p.mu.Unlock()
			close(f.done)
		})
	}
	waiter := f.next
	f.next++
	f.waiters[waiter] = progress
	if progress != nil && f.last.Phase != "" {
		progress(f.last)
	}
	return f, waiter
}

func (p *pulls) leave(name string, f *flight, waiter int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(f.waiters, waiter)
	if len(f.waiters) > 0 {
		return
	}
	f.cancel()
	if p.running[name] == f {
		delete(p.running, name) // the next caller begins another pull
	}
}

// report passes progress on under the lock, so that no callback runs after its caller has left. Callbacks must not block.
func (p *pulls) report(f *flight, pr runtime.Progress) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.last = pr
	for _, progress := range f.waiters {
		if progress != nil {
			progress(pr)
		}
	}
}

// close cancels all pulls and waits for them.
func (p *pulls) close() {
	p.mu.Lock()
	for _, f := range p.running {
		f.cancel()
	}
	p.mu.Unlock()
	p.wg.Wait()
}
