// Package tunnel is the client of TunnelService: connections to TCP ports of a sandbox, any number of them in one stream, or one as a net.Conn.
// Locks: that of a session and that of a connection are never held together, and nothing is sent under them.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"

	"google.golang.org/grpc"

	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
)

// Stream is a stream of TunnelService.
type Stream = grpc.BidiStreamingClient[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]

const (
	// window is how much each side may send for a connection without an acknowledgment, and chunk how much in one message. Both are of the API.
	window = 256 << 10
	chunk  = 64 << 10
)

var errProtocol = errors.New("the server sent more than the window of a connection")

// RefusedError says that nothing listens at a port.
type RefusedError struct{ Message string }

// Error implements error.
func (e *RefusedError) Error() string {
	if e.Message == "" {
		return "nothing listens at the port"
	}
	return e.Message
}

// lostError is why the connections of a stream that has ended have ended.
type lostError struct{ cause error }

func (e *lostError) Error() string { return "the stream was lost: " + e.cause.Error() }

func (e *lostError) Unwrap() error { return e.cause }

func lost(err error) error {
	if errors.Is(err, io.EOF) {
		err = errors.New("the server ended it")
	}
	return &lostError{err}
}

// Session is one stream. Make it with NewSession. Its methods may be called concurrently.
type Session struct {
	cancel  context.CancelCauseFunc
	stream  Stream
	sending sync.Mutex

	mu    sync.Mutex
	open  map[uint32]*connection
	last  uint32
	ended error
}

// NewSession returns a Session, and names the sandbox to the server. cancel ends the context of the stream.
func NewSession(cancel context.CancelCauseFunc, stream Stream, namespace, name string) (*Session, error) {
	if err := stream.Send(&tunnelv1.TunnelRequest{Namespace: namespace, Name: name}); err != nil {
		_, err = stream.Recv() // which says why
		return nil, err
	}
	return &Session{cancel: cancel, stream: stream, open: map[uint32]*connection{}}, nil
}

// Cancel ends the stream.
func (s *Session) Cancel(cause error) { s.cancel(cause) }

// connection is one connection of a session.
//
//	opening --opened--> open --finished--> half-closed --closed--> closed
//	   |                  |                                           ^
//	   +------------------+------------------closed------------------+
type connection struct {
	id uint32

	mu   sync.Mutex
	more *sync.Cond // something below has changed
	// opened: the port has accepted the connection. finished: it sends no more. closed: nothing comes any longer, because of reason if that is set.
	opened, finished, closed bool
	reason                   error
	// pending is what the port has sent and the local program has not taken, and taking how much of that is being written: at most a window.
	pending []byte
	taking  int
	// credit is how much may be sent to the port.
	credit int64
}

func (c *connection) change(f func()) {
	c.mu.Lock()
	f()
	c.mu.Unlock()
	c.more.Broadcast()
}

// close ends the connection, unless it has ended.
func (c *connection) close(reason error) {
	c.change(func() {
		if !c.closed {
			c.closed, c.reason = true, reason
		}
	})
}

// wait waits until ready reports true, and returns what it left under the lock.
func (c *connection) wait(ready func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !ready() {
		c.more.Wait()
	}
}

func (s *Session) send(id uint32, f *tunnelv1.Frame) error {
	f.Connection = id
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.stream.Send(&tunnelv1.TunnelRequest{Frame: f})
}

// Receive distributes what the server sends until the stream ends, and returns why it ended. It is called once.
func (s *Session) Receive() error {
	for {
		m, err := s.stream.Recv()
		if err != nil {
			return err
		}
		f := m.GetFrame()
		s.mu.Lock()
		c := s.open[f.GetConnection()]
		s.mu.Unlock()
		if f == nil || c == nil {
			continue // a connection that was closed here
		}
		if err := c.receive(f); err != nil {
			s.cancel(err)
			return err
		}
	}
}

func (c *connection) receive(f *tunnelv1.Frame) error {
	over := false
	switch e := f.GetEvent().(type) {
	case *tunnelv1.Frame_Opened_:
		c.change(func() { c.opened = true })
	case *tunnelv1.Frame_Data:
		c.change(func() {
			if over = len(c.pending)+c.taking+len(e.Data) > window; !over {
				c.pending = append(c.pending, e.Data...)
			}
		})
	case *tunnelv1.Frame_Window:
		c.change(func() { c.credit = min(c.credit+e.Window, window) })
	case *tunnelv1.Frame_Finished_:
		c.change(func() { c.finished = true })
	case *tunnelv1.Frame_Closed_:
		c.close(reasonOf(e.Closed))
	}
	if over {
		return errProtocol
	}
	return nil
}

// reasonOf returns why the server closed a connection; nil if both sides had finished.
func reasonOf(closed *tunnelv1.Frame_Closed) error {
	switch text := closed.GetMessage(); {
	case closed.GetRefused():
		return &RefusedError{text}
	case text != "":
		return errors.New(text)
	}
	return nil
}

// End ends all connections, after the stream has ended.
func (s *Session) End(err error) {
	s.mu.Lock()
	s.ended = lost(err)
	all := s.open
	s.open = map[uint32]*connection{}
	s.mu.Unlock()
	for _, c := range all {
		c.close(lost(err))
	}
}

// add returns a new connection.
func (s *Session) add() (*connection, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return nil, s.ended
	}
	s.last++
	for s.open[s.last] != nil {
		s.last++
	}
	c := &connection{id: s.last, credit: window}
	c.more = sync.NewCond(&c.mu)
	s.open[c.id] = c
	return c, nil
}

// Carry opens a connection to a port of the sandbox, and copies in both directions until both have ended. It returns why that failed.
func (s *Session) Carry(local net.Conn, port int) error {
	c, err := s.connect(port)
	if err != nil {
		return err
	}
	return s.copy(c, local, func(error) { _ = local.Close() })
}

// connect opens a connection, and waits until the port has accepted or refused it.
func (s *Session) connect(port int) (*connection, error) {
	c, err := s.add()
	if err != nil {
		return nil, err
	}
	open := &tunnelv1.Frame_Open{Port: int32(port)}
	if err := s.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Open_{Open: open}}); err != nil && !errors.Is(err, io.EOF) {
		s.forget(c)
		return nil, lost(err)
	} // io.EOF: the stream has ended, and Receive has the reason
	accepted := false
	c.wait(func() bool {
		accepted, err = c.opened, c.reason
		return c.opened || c.closed
	})
	if !accepted && err != nil {
		s.forget(c)
		return nil, err
	}
	return c, nil
}

func (s *Session) forget(c *connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, c.id)
}

// copy copies in both directions until both have ended. Then, or when that fails, it calls end, which ends what waits for local.
func (s *Session) copy(c *connection, local io.ReadWriter, end func(error)) error {
	defer s.forget(c)
	var up sync.WaitGroup
	up.Go(func() { s.up(c, local) })
	err := s.down(c, local)
	end(err)
	up.Wait()
	return err
}

// abort ends a connection from this side.
func (s *Session) abort(c *connection, err error) {
	c.close(err)
	_ = s.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Closed_{Closed: &tunnelv1.Frame_Closed{}}})
}

// up passes on what the local program sends, as far as the port takes it.
func (s *Session) up(c *connection, local io.Reader) {
	buffer := make([]byte, chunk)
	for {
		room, closed := int64(0), false
		c.wait(func() bool {
			room, closed = c.credit, c.closed
			return room > 0 || closed
		})
		if closed {
			return
		}
		n, err := local.Read(buffer[:min(chunk, room)])
		if n > 0 {
			c.change(func() { c.credit -= int64(n) })
			if s.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Data{Data: append([]byte(nil), buffer[:n]...)}}) != nil {
				return // the end of the stream closes the connection
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			_ = s.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Finished_{Finished: &tunnelv1.Frame_Finished{}}})
			return
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			s.abort(c, err)
			return
		}
	}
}

// down passes on what the port sends, and acknowledges it. It returns when the connection is closed.
func (s *Session) down(c *connection, local io.Writer) error {
	finished := false
	for {
		var data []byte
		var end, closed bool
		var reason error
		c.wait(func() bool {
			data, c.pending = c.pending, nil
			c.taking = len(data)
			end, closed, reason = c.finished && !finished, c.closed, c.reason
			return len(data) > 0 || end || closed
		})
		if len(data) > 0 {
			if _, err := local.Write(data); err != nil {
				s.abort(c, err)
				return fmt.Errorf("passing on what the port sent: %w", err)
			}
			c.change(func() { c.taking = 0 })
			if closed {
				continue
			}
			if err := s.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Window{Window: int64(len(data))}}); err != nil {
				continue // the end of the stream closes the connection
			}
			continue
		}
		if end {
			finished = true
			if half, ok := local.(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
		}
		if closed {
			return reason
		}
	}
}
