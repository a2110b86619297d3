package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// Dial opens a stream for one connection to a port of a sandbox. It returns when the port has accepted the connection or refused it, which is a
// *RefusedError; a stream that ends before that is the gRPC error it ended with. As for every net.Conn, the end of ctx does not end the connection.
//
// Close ends the connection at once, and the stream with it: bytes that are on their way to the port may be lost. A caller for whom they matter calls
// CloseWrite and reads until io.EOF before.
func Dial(ctx context.Context, open func(context.Context) (Stream, error), namespace, name string, port int) (net.Conn, error) {
	if port < 1 || port > 65535 {
		return nil, errors.New("a port is a number from 1 to 65535, not " + strconv.Itoa(port))
	}
	whole, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	detach := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	s, c, err := connect(whole, cancel, open, namespace, name, port)
	if !detach() && err == nil { // ctx has ended, and ends the stream
		c.close(nil)
		err = context.Cause(ctx)
	}
	if err != nil {
		cancel(nil)
		if s != nil {
			s.receiving.Wait()
		}
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if l, ok := errors.AsType[*lostError](err); ok {
			err = l.cause
		}
		return nil, err
	}
	return newConn(s, c, Address{namespace, name, port}), nil
}

// single is the session of a stream for one connection.
type single struct {
	*Session
	receiving sync.WaitGroup
}

// connect opens the stream and the connection. A session that it returns receives, also with an error.
func connect(
	ctx context.Context, cancel context.CancelCauseFunc, open func(context.Context) (Stream, error), namespace, name string, port int,
) (*single, *connection, error) {
	stream, err := open(ctx)
	if err != nil {
		return nil, nil, err
	}
	session, err := NewSession(cancel, stream, namespace, name)
	if err != nil {
		return nil, nil, err
	}
	s := &single{Session: session}
	s.receiving.Go(func() { s.End(s.Receive()) })
	c, err := s.connect(port)
	return s, c, err
}

// Address is a port of a sandbox.
type Address struct {
	Namespace, Sandbox string
	Port               int
}

// Network implements net.Addr.
func (Address) Network() string { return "tunnel" }

// String implements net.Addr.
func (a Address) String() string {
	return a.Namespace + "/" + net.JoinHostPort(a.Sandbox, strconv.Itoa(a.Port))
}

// conn is one connection. Each direction is a pipe of its own, which ends without the other one.
type conn struct {
	session *single
	address Address
	// in is what the port sends, and out what is sent to it.
	in, out net.Conn
	ended   chan struct{} // closed when the stream has ended

	mu sync.Mutex
	// finished: the port has sent all. over: nothing is carried any longer, because of failure if that is set. closed: Close or CloseWrite was called.
	finished, over, closed bool
	failure                error
}

var _ net.Conn = (*conn)(nil)

func newConn(s *single, open *connection, a Address) *conn {
	in, fromPort := net.Pipe()
	out, toPort := net.Pipe()
	c := &conn{session: s, address: a, in: in, out: out, ended: make(chan struct{})}
	go func() {
		defer close(c.ended)
		_ = s.copy(open, &farEnd{toPort, fromPort, c}, func(err error) {
			c.change(func() { c.over, c.failure = true, err })
			_, _ = toPort.Close(), fromPort.Close()
		})
		s.Cancel(nil)
		s.receiving.Wait()
	}()
	return c
}

// farEnd is what the session has of a conn.
type farEnd struct {
	out, in net.Conn
	conn    *conn
}

// Read implements io.Reader.
func (f *farEnd) Read(p []byte) (int, error) {
	n, err := f.out.Read(p)
	if errors.Is(err, io.ErrClosedPipe) {
		err = net.ErrClosed
	}
	return n, err
}

// Write implements io.Writer.
func (f *farEnd) Write(p []byte) (int, error) { return f.in.Write(p) }

// CloseWrite is called when the port has sent all.
func (f *farEnd) CloseWrite() error {
	f.conn.change(func() { f.conn.finished = true })
	return f.in.Close()
}

func (c *conn) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
}

// Read implements io.Reader. io.EOF means that the port has sent all: a connection that breaks has another error.
func (c *conn) Read(p []byte) (int, error) {
	n, err := c.in.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case errors.Is(err, io.ErrClosedPipe):
		err = c.wrap("read", net.ErrClosed)
	case errors.Is(err, io.EOF) && !c.finished && c.failure != nil:
		err = c.wrap("read", c.failure)
	}
	return n, err
}

// Write implements io.Writer.
func (c *conn) Write(p []byte) (int, error) {
	n, err := c.out.Write(p)
	if !errors.Is(err, io.ErrClosedPipe) {
		return n, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		err = net.ErrClosed
	case c.failure != nil:
		err = c.failure
	default:
		err = syscall.EPIPE
	}
	return n, c.wrap("write", err)
}

func (c *conn) wrap(op string, err error) error {
	return &net.OpError{Op: op, Net: c.address.Network(), Addr: c.address, Err: err}
}

// CloseWrite ends what is sent to the port. What it sends can still be read.
func (c *conn) CloseWrite() error {
	c.change(func() { c.closed = true })
	return c.out.Close()
}

// Close implements net.Conn. It waits for the end of the stream.
func (c *conn) Close() error {
	c.change(func() { c.closed = true })
	c.session.Cancel(net.ErrClosed)
	_, _ = c.in.Close(), c.out.Close()
	<-c.ended
	return nil
}

// LocalAddr implements net.Conn.
func (c *conn) LocalAddr() net.Addr { return Address{} }

// RemoteAddr implements net.Conn. It is an Address.
func (c *conn) RemoteAddr() net.Addr { return c.address }

// SetDeadline implements net.Conn.
func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.in.SetReadDeadline(t), c.out.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *conn) SetReadDeadline(t time.Time) error { return c.in.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn.
func (c *conn) SetWriteDeadline(t time.Time) error { return c.out.SetWriteDeadline(t) }
