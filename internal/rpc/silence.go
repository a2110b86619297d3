package rpc

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
)

// acceptedKey is the metadata key by which a server says that it has received a unary call, before it handles it.
const acceptedKey = "fast-sandbox-accepted"

// DefaultSilence is how long clients of the API wait for a server to say that it has received a call. gRPC itself finds a process
// that is stopped, or a node that is gone, only after 15 s (its keepalive has a minimum of 10 s), and a create should not wait for
// that.
const DefaultSilence = 3 * time.Second

// errSilent is why a call ends whose server does not say that it has received it.
var errSilent = errors.New("the server does not answer")

// accept says that a unary call was received.
func accept(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	// It fails only after the end of the call.
	_ = grpc.SendHeader(ctx, metadata.Pairs(acceptedKey, "1"))
	return handler(ctx, req)
}

// silence ends unary calls whose server does not say within a time that it has received them, and closes the connection if nothing
// came by it since. It does so only for servers that have said so before: others answer when they are done. A call that it ended
// has an unknown outcome, as after any broken connection.
type silence struct {
	limit time.Duration
	// proven is set by the first server of the connection that says that it has received a call.
	proven atomic.Bool

	mu    sync.Mutex
	conns map[link]*trackedConn
}

// link names a connection by the addresses of its ends.
type link struct{ local, remote string }

// wait is what is known of one call.
type wait struct {
	mu    sync.Mutex
	link  link // zero until the call was sent
	sent  time.Time
	timer *time.Timer
}

type waitKey struct{}

// options returns the dial options.
func (s *silence) options() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithChainUnaryInterceptor(s.unary), grpc.WithStatsHandler(s)}
}

func (s *silence) unary(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	inner, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	w := &wait{}
	// The time runs from when the call is sent: connections are established within a bound of their own.
	w.timer = time.AfterFunc(time.Hour, func() { cancel(errSilent) })
	w.timer.Stop()
	defer w.timer.Stop()
	err := invoke(context.WithValue(inner, waitKey{}, w), method, req, reply, cc, opts...)
	if err == nil || !errors.Is(context.Cause(inner), errSilent) || ctx.Err() != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	s.hangUp(w.link, w.sent)
	return status.Error(codes.Unavailable, errSilent.Error())
}

// TagRPC implements stats.Handler.
func (s *silence) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (s *silence) HandleRPC(ctx context.Context, event stats.RPCStats) {
	w, ok := ctx.Value(waitKey{}).(*wait)
	if !ok {
		return
	}
	switch event := event.(type) {
	case *stats.OutHeader:
		w.mu.Lock()
		defer w.mu.Unlock()
		w.sent = time.Now()
		if event.LocalAddr != nil && event.RemoteAddr != nil {
			w.link = link{event.LocalAddr.String(), event.RemoteAddr.String()}
		}
		if s.proven.Load() {
			w.timer.Reset(s.limit)
		}
	case *stats.InHeader:
		w.timer.Stop()
		if len(event.Header.Get(acceptedKey)) > 0 {
			s.proven.Store(true)
		}
	}
}

// TagConn implements stats.Handler.
func (s *silence) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// HandleConn implements stats.Handler.
func (s *silence) HandleConn(context.Context, stats.ConnStats) {}

// hangUp closes a connection if nothing came by it since a time.
func (s *silence) hangUp(l link, since time.Time) {
	s.mu.Lock()
	conn := s.conns[l]
	s.mu.Unlock()
	if conn != nil && conn.lastRead.Load() < since.UnixNano() {
		_ = conn.Close()
	}
}

// over returns credentials whose connections are known to s.
func (s *silence) over(c credentials.TransportCredentials) credentials.TransportCredentials {
	return trackedCredentials{c, s}
}

// trackedCredentials note when their connections have last received something.
type trackedCredentials struct {
	credentials.TransportCredentials
	silence *silence
}

// ClientHandshake implements credentials.TransportCredentials.
func (c trackedCredentials) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ClientHandshake(ctx, authority, raw)
	if err != nil {
		return nil, nil, err
	}
	tracked := &trackedConn{Conn: conn, silence: c.silence, link: link{raw.LocalAddr().String(), raw.RemoteAddr().String()}}
	tracked.lastRead.Store(time.Now().UnixNano())
	c.silence.mu.Lock()
	defer c.silence.mu.Unlock()
	c.silence.conns[tracked.link] = tracked
	return tracked, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c trackedCredentials) Clone() credentials.TransportCredentials {
	return trackedCredentials{c.TransportCredentials.Clone(), c.silence}
}

// trackedConn is a connection that knows when something last came by it.
type trackedConn struct {
	net.Conn
	silence  *silence
	link     link
	lastRead atomic.Int64 // Unix time in nanoseconds
}

// Read implements net.Conn.
func (c *trackedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.lastRead.Store(time.Now().UnixNano())
	}
	return n, err
}

// Close implements net.Conn.
func (c *trackedConn) Close() error {
	c.silence.mu.Lock()
	if c.silence.conns[c.link] == c { // a later one may have the same ports
		delete(c.silence.conns, c.link)
	}
	c.silence.mu.Unlock()
	return c.Conn.Close()
}
