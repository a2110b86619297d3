// Package faketunnel is a TunnelService in memory, without an agent and a sandbox: its ports are what a test connects them to. It keeps the windows of
// the API and fails a stream whose client does not.
package faketunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
)

const (
	window  = 256 << 10
	chunk   = 64 << 10
	waiting = 1 << 12 // the most messages that wait for a port
	streams = 64      // the most streams of a test
)

// Server is the service. Its fields are set before it is used.
type Server struct {
	tunnelv1.UnimplementedTunnelServiceServer

	// Connect connects to a port; an error means that nothing listens there.
	Connect func(ctx context.Context, port int) (net.Conn, error)
	// Refuse, if it is set, returns why a stream to a sandbox is refused; nil if it is not.
	Refuse func(namespace, name string) error
	// Broken, if it is set, ends streams when it is closed.
	Broken chan struct{}
	// Ended has why each stream ended.
	Ended chan error
}

// New returns a Server.
func New(connect func(ctx context.Context, port int) (net.Conn, error)) *Server {
	return &Server{Connect: connect, Ended: make(chan error, streams)}
}

// Serve serves it until the test ends, and returns a connection to it.
func (s *Server) Serve(t *testing.T) *grpc.ClientConn {
	t.Helper()
	listener, server, served := bufconn.Listen(1<<20), grpc.NewServer(), make(chan error, 1)
	tunnelv1.RegisterTunnelServiceServer(server, s)
	go func() { served <- server.Serve(listener) }()
	conn, err := grpc.NewClient("passthrough:///tunnel", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		server.Stop()
		require.NoError(t, <-served)
	})
	return conn
}

// Tunnel implements TunnelService.
func (s *Server) Tunnel(stream grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]) (err error) {
	ctx, cancel := context.WithCancel(stream.Context())
	v := &served{ctx: ctx, server: s, stream: stream, links: map[uint32]*link{}}
	defer func() {
		cancel()
		v.wg.Wait()
		s.Ended <- err
	}()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if s.Refuse != nil {
		if err := s.Refuse(first.GetNamespace(), first.GetName()); err != nil {
			return err
		}
	}
	failed := make(chan error, 1)
	go func() { failed <- v.receive() }()
	select {
	case err := <-failed:
		return err
	case <-s.Broken:
		return status.Error(codes.Unavailable, "the stream broke")
	}
}

// served is one stream.
type served struct {
	ctx     context.Context //nolint:containedctx // of the call
	server  *Server
	stream  grpc.BidiStreamingServer[tunnelv1.TunnelRequest, tunnelv1.TunnelResponse]
	wg      sync.WaitGroup
	sending sync.Mutex

	mu    sync.Mutex
	links map[uint32]*link
}

// link is one connection.
type link struct {
	id    uint32
	conn  net.Conn
	input chan []byte // what the client sends
	gone  chan struct{}
	once  sync.Once

	mu     sync.Mutex
	more   *sync.Cond
	unread int64 // bytes of the client that were not acknowledged
	credit int64 // bytes that may be sent to the client
	ended  bool
}

func (v *served) send(id uint32, f *tunnelv1.Frame) {
	f.Connection = id
	v.sending.Lock()
	defer v.sending.Unlock()
	_ = v.stream.Send(&tunnelv1.TunnelResponse{Frame: f})
}

func (v *served) close(id uint32, message string, refused bool) {
	v.send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Closed_{Closed: &tunnelv1.Frame_Closed{Message: message, Refused: refused}}})
}

func (v *served) receive() error {
	for {
		m, err := v.stream.Recv()
		if err != nil {
			return err
		}
		id := m.GetFrame().GetConnection()
		v.mu.Lock()
		l := v.links[id]
		v.mu.Unlock()
		if open := m.GetFrame().GetOpen(); open != nil {
			v.begin(id, int(open.GetPort()))
			continue
		}
		if l == nil {
			continue
		}
		switch e := m.GetFrame().GetEvent().(type) {
		case *tunnelv1.Frame_Data:
			if l.add(&l.unread, int64(len(e.Data))) > window || len(e.Data) > chunk {
				return status.Error(codes.InvalidArgument, "more than the window was sent")
			}
			l.input <- e.Data
		case *tunnelv1.Frame_Window:
			l.add(&l.credit, e.Window)
		case *tunnelv1.Frame_Finished_:
			close(l.input)
		case *tunnelv1.Frame_Closed_:
			l.end()
		}
	}
}

func (v *served) begin(id uint32, port int) {
	conn, err := v.server.Connect(v.ctx, port)
	if err != nil {
		v.close(id, "connection refused", true)
		return
	}
	l := &link{id: id, conn: conn, input: make(chan []byte, waiting), gone: make(chan struct{}), credit: window}
	l.more = sync.NewCond(&l.mu)
	v.mu.Lock()
	v.links[id] = l
	v.mu.Unlock()
	v.send(id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Opened_{Opened: &tunnelv1.Frame_Opened{}}})
	stop := context.AfterFunc(v.ctx, l.end)
	v.wg.Go(func() {
		defer stop()
		var up sync.WaitGroup
		up.Go(func() { v.up(l) })
		message := ""
		if err := v.down(l); err != nil {
			message = err.Error()
			l.end()
		}
		up.Wait()
		l.end()
		if v.ctx.Err() == nil { // else the stream has ended before
			v.close(id, message, false)
		}
	})
}

// up passes on what the client sends, and acknowledges it.
func (v *served) up(l *link) {
	for {
		var data []byte
		var ok bool
		select {
		case data, ok = <-l.input:
		case <-l.gone:
		}
		if !ok {
			if half, ok := l.conn.(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
			return
		}
		if _, err := l.conn.Write(data); err != nil {
			l.end()
			return
		}
		l.add(&l.unread, -int64(len(data)))
		v.send(l.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Window{Window: int64(len(data))}})
	}
}

// down passes on what the port sends.
func (v *served) down(l *link) error {
	buffer := make([]byte, chunk)
	for {
		n, err := l.conn.Read(buffer[:min(chunk, l.room())])
		if n > 0 {
			l.add(&l.credit, -int64(n))
			v.send(l.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Data{Data: append([]byte(nil), buffer[:n]...)}})
		}
		if errors.Is(err, io.EOF) {
			v.send(l.id, &tunnelv1.Frame{Event: &tunnelv1.Frame_Finished_{Finished: &tunnelv1.Frame_Finished{}}})
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// room waits until something may be sent to the client, and returns how much. After the end, the read that follows fails.
func (l *link) room() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.credit <= 0 && !l.ended {
		l.more.Wait()
	}
	return max(l.credit, 1)
}

func (l *link) add(to *int64, n int64) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	*to += n
	l.more.Broadcast()
	return *to
}

func (l *link) end() {
	l.mu.Lock()
	l.ended = true
	l.mu.Unlock()
	l.more.Broadcast()
	l.once.Do(func() { close(l.gone) })
	_ = l.conn.Close()
}
