package rpc

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"google.golang.org/grpc"

	files "github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/inside"
	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// window is how much each side may send for a connection without an acknowledgment.
	window = 256 << 10
	// tunnelChunk is how much a message has at most, and maxTunneled how many connections one stream may have.
	tunnelChunk = 64 << 10
	maxTunneled = 1024
)

// Tunnels is TunnelService. Make it with NewTunnels.
type Tunnels struct {
	tunnelv1.UnimplementedTunnelServiceServer

	processes *Processes
}

// NewTunnels returns a TunnelService for the same sandboxes.
func NewTunnels(p *Processes) *Tunnels { return &Tunnels{processes: p} }

// Tunnel carries connections to ports of a sandbox.
func (t *Tunnels) Tunnel(stream grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]) error {
	ctx, cancel := context.WithCancelCause(stream.Context())
	defer cancel(nil)
	s, ended, err := t.processes.running(ctx)
	if err != nil {
		return err
	}
	go func() {
		select {
		case <-t.processes.service.closing:
			cancel(errStopping())
		case <-ended: // a tunnel without a connection has no other way to know
			cancel(errEnded())
		case <-ctx.Done():
		}
	}()
	tunnel := &tunnel{ctx: ctx, sandbox: s, stream: stream, open: map[uint32]*tunneled{}}
	failed := make(chan error, 1)
	go func() { failed <- tunnel.receive() }()
	select {
	case err = <-failed:
	case <-ctx.Done():
		err = context.Cause(ctx)
	}
	cancel(nil)
	tunnel.wg.Wait()
	return err
}

// tunnel is one stream.
type tunnel struct {
	ctx     context.Context //nolint:containedctx // of the call
	sandbox inside.Sandbox
	stream  grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]
	wg      sync.WaitGroup
	sending sync.Mutex

	mu   sync.Mutex
	open map[uint32]*tunneled
}

// tunneled is one connection.
type tunneled struct {
	id     uint32
	cancel context.CancelFunc

	mu   sync.Mutex
	more *sync.Cond // something below has changed
	// pending is what the client has sent and the port has not taken, at most a window; taking is how much of that is being written. finished: the
	// client sends no more.
	pending  []byte
	taking   int
	finished bool
	// credit is how much may be sent to the client.
	credit int64
	closed bool
}

// change changes the state, and wakes those that wait for it.
func (c *tunneled) change(f func()) {
	c.mu.Lock()
	f()
	c.mu.Unlock()
	c.more.Broadcast()
}

func (t *tunnel) send(id uint32, f *tunnelv1.Frame) error {
	f.Connection = id
	t.sending.Lock()
	defer t.sending.Unlock()
	return t.stream.Send(&tunnelv1.TunnelResponse{Frame: f})
}

// receive takes the client's messages until it ends the stream. Then connections run on until they are closed.
func (t *tunnel) receive() error {
	for {
		m, err := t.stream.Recv()
		if errors.Is(err, io.EOF) {
			t.wg.Wait()
			return nil
		}
		if err != nil {
			return err
		}
		if m.GetFrame() == nil {
			continue
		}
		if err := t.frame(m.GetFrame()); err != nil {
			return err
		}
	}
}

func (t *tunnel) frame(f *tunnelv1.Frame) error {
	id := f.GetConnection()
	t.mu.Lock()
	c := t.open[id]
	n := len(t.open)
	t.mu.Unlock()
	if open := f.GetOpen(); open != nil {
		switch {
		case c != nil:
			return fault.Field("frame.connection", "connection %d is open", id)
		case n >= maxTunneled:
			return t.send(id, closedFrame("too many connections in one stream", false))
		}
		t.begin(id, open)
		return nil
	}
	if c == nil {
		return nil // it has just been closed
	}
	switch {
	case f.GetFinished() != nil:
		c.change(func() { c.finished = true })
	case f.GetClosed() != nil:
		c.end()
	case f.GetWindow() > 0:
		c.change(func() { c.credit = min(c.credit+f.GetWindow(), window) })
	case len(f.GetData()) > 0:
		over := false
		c.change(func() {
			if over = len(c.pending)+c.taking+len(f.GetData()) > window; !over {
				c.pending = append(c.pending, f.GetData()...)
			}
		})
		if over {
			return fault.Field("frame.data", "more than the window of %d bytes was sent for connection %d", window, id)
		}
	}
	return nil
}

// begin opens a connection and carries it.
func (t *tunnel) begin(id uint32, open *tunnelv1.Frame_Open) {
	ctx, cancel := context.WithCancel(t.ctx)
	c := &tunneled{id: id, credit: window, cancel: cancel}
	c.more = sync.NewCond(&c.mu)
	t.mu.Lock()
	t.open[id] = c
	t.mu.Unlock()
	t.wg.Go(func() {
		defer cancel()
		message, refused := t.carry(ctx, c, open)
		t.mu.Lock()
		delete(t.open, id)
		t.mu.Unlock()
		_ = t.send(id, closedFrame(message, refused))
	})
}

func closedFrame(message string, refused bool) *tunnelv1.Frame {
	return &tunnelv1.Frame{Event: &tunnelv1.Frame_Closed_{Closed: &tunnelv1.Frame_Closed{Message: message, Refused: refused}}}
}

// end ends a connection.
func (c *tunneled) end() {
	c.change(func() { c.closed = true })
	c.cancel()
}

// carry connects, and copies in both directions until both have ended. It returns why that failed.
func (t *tunnel) carry(ctx context.Context, c *tunneled, open *tunnelv1.Frame_Open) (message string, refused bool) {
	h, err := t.sandbox.Helper(ctx, "")
	if err == nil {
		defer h.Close()
		_, err = h.Call(&files.Call{Op: files.Dial, Address: open.GetAddress(), Port: int(open.GetPort())})
	}
	if err != nil {
		f, _ := errors.AsType[*files.Failure](err)
		return inside.Fault(err, "").Error(), f != nil && f.Errno == syscall.ECONNREFUSED
	}
	if err := t.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Opened_{Opened: &tunnelv1.Frame_Opened{}}}); err != nil {
		return err.Error(), false
	}
	stop := context.AfterFunc(ctx, c.end)
	defer stop()
	reader, conn := h.Stream()
	var wg sync.WaitGroup
	wg.Go(func() { t.up(c, conn) })
	err = t.down(c, reader)
	if err != nil {
		c.end()
		_ = conn.Close()
	}
	wg.Wait()
	if err != nil {
		return err.Error(), false
	}
	return "", false
}

// up passes on what the client sends, and acknowledges it.
func (t *tunnel) up(c *tunneled, conn *net.UnixConn) {
	for {
		data, ok := c.take()
		if !ok {
			_ = conn.CloseWrite()
			return
		}
		if _, err := conn.Write(data); err != nil {
			c.end()
			return
		}
		c.change(func() { c.taking = 0 })
		if t.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Window{Window: int64(len(data))}}) != nil {
			c.end()
			return
		}
	}
}

// take waits for what the client has sent. ok is false if nothing more comes.
func (c *tunneled) take() (data []byte, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(c.pending) == 0 && !c.finished && !c.closed {
		c.more.Wait()
	}
	if c.closed || len(c.pending) == 0 {
		return nil, false
	}
	data, c.pending = c.pending, nil
	c.taking = len(data)
	return data, true
}

// down passes on what the port sends, as far as the client takes it.
func (t *tunnel) down(c *tunneled, from io.Reader) error {
	buffer := make([]byte, tunnelChunk)
	for {
		c.mu.Lock()
		for c.credit <= 0 && !c.closed {
			c.more.Wait()
		}
		room, closed := c.credit, c.closed
		c.mu.Unlock()
		if closed {
			return errors.New("the connection was closed")
		}
		n, err := from.Read(buffer[:min(int64(len(buffer)), room)])
		if n > 0 {
			c.change(func() { c.credit -= int64(n) })
			data := append([]byte(nil), buffer[:n]...)
			if err := t.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Data{Data: data}}); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return t.send(c.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Finished_{Finished: &tunnelv1.Frame_Finished{}}})
		}
		if err != nil {
			return err
		}
	}
}
