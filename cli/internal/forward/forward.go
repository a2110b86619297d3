// Package forward carries connections to local ports into a sandbox: all of them in one stream of TunnelService, which is opened again when it
// breaks. A Forwarder runs once.
package forward

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/tunnel"
)

const (
	// openTimeout is how long a new connection waits for a stream that is being opened again.
	openTimeout = 10 * time.Second
	// settled is how long a stream has to last for the delays before the next one to start over.
	settled = 5 * time.Second
)

// Port is a listener and the port of the sandbox that it leads to.
type Port struct {
	Listener net.Listener
	Remote   int
}

// Forwarder forwards ports.
type Forwarder struct {
	Namespace, Sandbox string
	Clock              clock.WithTicker
	// Open opens a stream that lives as long as its context.
	Open func(context.Context) (tunnel.Stream, error)
	// Retry reports whether a stream that ended with an error is opened again.
	Retry func(error) bool
	// Report receives, for people, each connection that fails and each loss of the stream. It may be called concurrently.
	Report func(format string, args ...any)

	mu      sync.Mutex
	current *tunnel.Session
	changed chan struct{} // closed when current changes
}

// Run forwards until ctx ends or a stream ends with an error that is not retried, which it returns. It closes the listeners.
func (f *Forwarder) Run(ctx context.Context, ports []Port) error {
	ctx, cancel := context.WithCancel(ctx)
	f.changed = make(chan struct{})
	var wg sync.WaitGroup
	for _, p := range ports {
		wg.Go(func() { f.accept(ctx, p, &wg) })
		wg.Go(func() { <-ctx.Done(); _ = p.Listener.Close() })
	}
	err := f.streams(ctx)
	cancel()
	wg.Wait()
	return err
}

// Restart ends the stream, for one to another container.
func (f *Forwarder) Restart() {
	f.mu.Lock()
	s := f.current
	f.mu.Unlock()
	if s != nil {
		s.Cancel(errRestart)
	}
}

var errRestart = errors.New("the sandbox has another container")

// streams keeps a stream open.
func (f *Forwarder) streams(ctx context.Context) error {
	policy := backoff.Policy{Initial: 100 * time.Millisecond, Max: 2 * time.Second}
	delays, reported := backoff.New(f.Clock, policy), false
	for {
		begin := f.Clock.Now()
		err := f.stream(ctx)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the user has ended it
		}
		restart := errors.Is(err, errRestart)
		if !restart && !f.Retry(err) {
			return err
		}
		if f.Clock.Since(begin) >= settled {
			delays, reported = backoff.New(f.Clock, policy), false
		}
		if !reported {
			f.Report("the stream to sandbox %q is lost and is opened again: %v", f.Sandbox, err)
			reported = true
		}
		timer := f.Clock.NewTimer(delays.Next())
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
		}
	}
}

// stream opens a stream, and carries connections until it ends.
func (f *Forwarder) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := f.Open(ctx)
	if err != nil {
		return err
	}
	s, err := tunnel.NewSession(cancel, stream, f.Namespace, f.Sandbox)
	if err != nil {
		return err
	}
	f.set(s)
	err = s.Receive()
	f.set(nil)
	if errors.Is(context.Cause(ctx), errRestart) {
		err = errRestart
	}
	cancel(nil)
	s.End(err)
	return err
}

func (f *Forwarder) set(s *tunnel.Session) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current = s
	close(f.changed)
	f.changed = make(chan struct{})
}

// session returns the stream. It waits for one for some time.
func (f *Forwarder) session(ctx context.Context) (*tunnel.Session, error) {
	timer := f.Clock.NewTimer(openTimeout)
	defer timer.Stop()
	for {
		f.mu.Lock()
		s, changed := f.current, f.changed
		f.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-changed:
		case <-timer.C():
			return nil, errors.New("there is no stream to the sandbox")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// accept carries the connections of a listener.
func (f *Forwarder) accept(ctx context.Context, p Port, wg *sync.WaitGroup) {
	for {
		local, err := p.Listener.Accept()
		switch {
		case err == nil:
			wg.Go(func() { f.carry(ctx, p.Remote, local) })
		case ctx.Err() != nil || errors.Is(err, net.ErrClosed):
			return
		default:
			f.Report("accepting a connection at %s: %v", p.Listener.Addr(), err)
			timer := f.Clock.NewTimer(time.Second) // too many open files, for instance
			select {
			case <-timer.C():
			case <-ctx.Done():
				timer.Stop()
			}
		}
	}
}

// carry carries one connection, and reports why it failed.
func (f *Forwarder) carry(ctx context.Context, port int, local net.Conn) {
	defer func() { _ = local.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = local.Close() })
	defer stop()
	s, err := f.session(ctx)
	if err == nil {
		err = s.Carry(local, port)
	}
	if err != nil && ctx.Err() == nil && !isReset(err) {
		f.Report("connection from %s to port %d: %v", local.RemoteAddr(), port, err)
	}
}

// isReset reports whether the local program has ended its connection, which is no failure of the forwarding.
func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}
