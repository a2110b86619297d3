package inside

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/slot/claim/wire"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// Timeouts are how long calls wait for a sandbox that is silent. The zero value is DefaultTimeouts.
type Timeouts struct {
	// First is after what time of silence the supervisor is asked whether it answers at all. The time doubles with each answer, up to Quiet.
	First, Quiet time.Duration
	// Answer is how long it has for the answer to that.
	Answer time.Duration
}

// DefaultTimeouts is that of the agent: a sandbox that is given little processor time may take seconds.
func DefaultTimeouts() Timeouts {
	return Timeouts{First: 2 * time.Second, Quiet: 10 * time.Second, Answer: 8 * time.Second}
}

var (
	errPaused = fault.New(errdefs.ErrFailedPrecondition, fault.SandboxPaused, "the sandbox is paused")                            //nolint:gochecknoglobals // constant
	errSilent = fault.New(errdefs.ErrUnavailable, fault.SandboxUnresponsive, "the supervisor of the sandbox does not answer now") //nolint:gochecknoglobals // constant
)

// line is a connection to a supervisor or a helper that waits for neither without end: when nothing has come for a while, it has the supervisor asked
// whether it answers. A process that is silent is no reason to end a call, a supervisor that is silent is.
type line struct {
	*net.UnixConn
	sandbox Sandbox
	// helper: the other side is to be a helper, which is not there yet.
	helper atomic.Bool
	began  time.Time
	reads  atomic.Int64
	cancel context.CancelFunc

	mu      sync.Mutex
	timer   *time.Timer
	closed  bool
	verdict error
}

// watched makes a connection a line. ctx is that of the call.
func (s Sandbox) watched(ctx context.Context, conn *net.UnixConn) *line {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx)) // until the line is closed
	l := &line{UnixConn: conn, sandbox: s, began: time.Now(), cancel: cancel}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.timer = time.AfterFunc(s.timeouts().First, func() { l.check(ctx, 0, s.timeouts().First) })
	return l
}

func (s Sandbox) timeouts() Timeouts {
	if s.Timeouts == (Timeouts{}) {
		return DefaultTimeouts()
	}
	return s.Timeouts
}

// check looks at a line after a time. seen is how many reads there were before it.
func (l *line) check(ctx context.Context, seen int64, after time.Duration) {
	now := l.reads.Load()
	var err error
	if now == seen {
		err = l.sandbox.ask(ctx)
		now = l.reads.Load()
	}
	p := l.sandbox.timeouts()
	if err == nil && l.helper.Load() && time.Since(l.began) >= p.First+p.Answer {
		err = errSilent // the supervisor answers, and the helper does not
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed:
	case err != nil && now == l.reads.Load():
		l.verdict = err
		_ = l.SetDeadline(time.Unix(1, 0))
	default:
		next := min(2*after, p.Quiet)
		l.timer = time.AfterFunc(next, func() { l.check(ctx, now, next) })
	}
}

// Read implements io.Reader.
func (l *line) Read(b []byte) (int, error) {
	n, err := l.UnixConn.Read(b)
	l.reads.Add(1)
	return n, l.judged(err)
}

// Write implements io.Writer.
func (l *line) Write(b []byte) (int, error) {
	n, err := l.UnixConn.Write(b)
	return n, l.judged(err)
}

// judged returns why a line was ended in place of the error that this led to.
func (l *line) judged(err error) error {
	if err == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.verdict != nil {
		return l.verdict
	}
	return err
}

// Close implements io.Closer.
func (l *line) Close() error {
	l.mu.Lock()
	l.closed = true
	l.timer.Stop()
	l.mu.Unlock()
	l.cancel()
	return l.UnixConn.Close()
}

// ask asks the supervisor for anything. The error says why it does not answer; nil also if it cannot be reached any longer, which the connections to
// it show.
func (s Sandbox) ask(ctx context.Context) error {
	p := s.timeouts()
	ctx, cancel := context.WithTimeout(ctx, p.Answer)
	defer cancel()
	answered := make(chan error, 1)
	go func() { answered <- s.ping(ctx) }()
	timer := time.NewTimer(p.First / 2)
	defer timer.Stop()
	select {
	case err := <-answered:
		return s.silence(ctx, err)
	case <-timer.C:
		if s.paused(ctx) {
			return errPaused
		}
	}
	return s.silence(ctx, <-answered)
}

// silence returns what to make of the error of ping.
func (s Sandbox) silence(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return nil
	}
	if s.paused(context.WithoutCancel(ctx)) {
		return errPaused
	}
	return errSilent
}

// pausedTimeout bounds the question whether a container is paused.
const pausedTimeout = 2 * time.Second

func (s Sandbox) paused(ctx context.Context) bool {
	if s.Container == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, pausedTimeout)
	defer cancel()
	return s.Container.Paused(ctx)
}

// ping sends a request that every supervisor answers at once: with the failure that there is no process without a pid.
func (s Sandbox) ping(ctx context.Context) error {
	conn, err := claim.Dial(ctx, s.Socket)
	if err != nil {
		if isFull(err) || ctx.Err() != nil {
			return err
		}
		return nil
	}
	defer conn.Close()
	stop := endWith(ctx, conn)
	defer stop()
	_, err = conn.Write(wire.Frame(wire.TypeSignal, wire.EncodeRequest(&wire.Request{})))
	if err == nil {
		_, _, err = read(conn)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	_ = err // whatever it is, the supervisor has answered, or has ended
	return nil
}

// isFull reports whether as many connections wait for a supervisor as may.
func isFull(err error) bool { return errors.Is(err, syscall.EAGAIN) }
