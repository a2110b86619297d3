package tunnel_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	tunnelv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/tunnel/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/faketunnel"
	"github.com/fast-sandbox/fast-sandbox/internal/tunnel"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// halves is a connection whose directions end on their own.
type halves interface {
	net.Conn
	CloseWrite() error
}

// sandbox is a sandbox with one port, 80, that a function serves.
type sandbox struct {
	*faketunnel.Server
	open func(context.Context) (tunnel.Stream, error)
}

func newSandbox(t *testing.T, serve func(halves)) *sandbox {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				serve(c.(halves)) //nolint:forcetypeassert // a test
			}()
		}
	}()
	t.Cleanup(func() {
		require.NoError(t, listener.Close())
		<-done
	})
	s := &sandbox{Server: faketunnel.New(func(ctx context.Context, port int) (net.Conn, error) {
		if port != 80 {
			return nil, errors.New("refused")
		}
		return (&net.Dialer{}).DialContext(ctx, "tcp", listener.Addr().String())
	})}
	return s
}

// serve makes the sandbox reachable; fields of the server are set before.
func (s *sandbox) serve(t *testing.T) *sandbox {
	t.Helper()
	client := tunnelv1.NewTunnelServiceClient(s.Serve(t))
	s.open = func(ctx context.Context) (tunnel.Stream, error) { return client.Tunnel(ctx) }
	return s
}

func (s *sandbox) dial(t *testing.T) halves {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := tunnel.Dial(ctx, s.open, "ns", "web", 80)
	require.NoError(t, err)
	cancel() // ends only the dialing
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	require.Equal(t, "ns/web:80", c.RemoteAddr().String())
	return c.(halves) //nolint:forcetypeassert // a test
}

func echo(c halves) {
	_, _ = io.Copy(c, c)
	_ = c.CloseWrite()
}

// TestDial sends many windows through an echo: both directions are carried at the same time, and each ends on its own.
func TestDial(t *testing.T) {
	s := newSandbox(t, echo).serve(t)
	c := s.dial(t)
	sent := make([]byte, 3<<20)
	_, _ = rand.Read(sent)
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(sent)
		written <- errors.Join(err, c.CloseWrite())
	}()
	received, err := io.ReadAll(c)
	require.NoError(t, err)
	require.NoError(t, <-written)
	require.True(t, bytes.Equal(sent, received))
	_, err = c.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	require.Equal(t, codes.Canceled, status.Code(<-s.Ended)) // without a Close
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
}

// TestDialHalfClose: what the port sends after its client has finished arrives, and the other way around.
func TestDialHalfClose(t *testing.T) {
	s := newSandbox(t, func(c halves) {
		raw, _ := io.ReadAll(c)
		_, _ = c.Write(append(raw, " and bye"...))
	}).serve(t)
	c := s.dial(t)
	_, err := c.Write([]byte("hello"))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	raw, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "hello and bye", string(raw))

	received := make(chan string, 1)
	s = newSandbox(t, func(c halves) {
		_, _ = c.Write([]byte("all"))
		_ = c.CloseWrite()
		raw, _ := io.ReadAll(c)
		received <- string(raw)
	}).serve(t)
	c = s.dial(t)
	raw, err = io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "all", string(raw))
	_, err = c.Write([]byte("later"))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	require.Equal(t, "later", <-received)
}

// TestDialRefused: the errors of a connection that never was are those of the API, and leave nothing behind.
func TestDialRefused(t *testing.T) {
	s := newSandbox(t, echo)
	s.Refuse = func(namespace, name string) error {
		if namespace != "ns" || name != "web" {
			return status.Errorf(codes.NotFound, "no sandbox %s/%s", namespace, name)
		}
		return nil
	}
	s.serve(t)
	_, err := tunnel.Dial(t.Context(), s.open, "ns", "web", 81)
	refused, ok := errors.AsType[*tunnel.RefusedError](err)
	require.True(t, ok, err)
	require.Equal(t, "connection refused", refused.Error())
	require.Equal(t, codes.Canceled, status.Code(<-s.Ended), "the stream is ended")

	_, err = tunnel.Dial(t.Context(), s.open, "ns", "other", 80)
	require.Equal(t, codes.NotFound, status.Code(err))
	require.Equal(t, "no sandbox ns/other", status.Convert(err).Message())
	require.Equal(t, codes.NotFound, status.Code(<-s.Ended))

	for _, port := range []int{-1, 0, 65536} {
		_, err = tunnel.Dial(t.Context(), s.open, "ns", "web", port)
		require.ErrorContains(t, err, "a port is a number from 1 to 65535")
	}
	cannot := errors.New("cannot open")
	_, err = tunnel.Dial(t.Context(), func(context.Context) (tunnel.Stream, error) { return nil, cannot }, "ns", "web", 80)
	require.ErrorIs(t, err, cannot)
}

// TestDialCanceled: the end of the context ends a dialing that the port does not answer.
func TestDialCanceled(t *testing.T) {
	s := newSandbox(t, echo)
	asked := make(chan struct{})
	s.Connect = func(ctx context.Context, _ int) (net.Conn, error) {
		close(asked)
		<-ctx.Done()
		return nil, ctx.Err()
	}
	s.serve(t)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	_, err := tunnel.Dial(ctx, s.open, "ns", "web", 80)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, codes.Canceled, status.Code(<-s.Ended))
}

// TestDialStreamIsLost: a stream that breaks is no end of what the port sends.
func TestDialStreamIsLost(t *testing.T) {
	s := newSandbox(t, echo)
	s.Broken = make(chan struct{})
	s.serve(t)
	c := s.dial(t)
	_, err := c.Write([]byte("beginning"))
	require.NoError(t, err)
	raw := make([]byte, len("beginning"))
	_, err = io.ReadFull(c, raw)
	require.NoError(t, err)
	close(s.Broken)
	_, err = io.ReadAll(c)
	require.ErrorContains(t, err, "the stream was lost")
	var st interface{ GRPCStatus() *status.Status }
	require.ErrorAs(t, err, &st)
	require.Equal(t, codes.Unavailable, st.GRPCStatus().Code())
	_, err = c.Write([]byte("x"))
	require.ErrorContains(t, err, "the stream was lost")
}

// TestDialBackpressure: a side that does not read stops the other one after some windows, and only until it reads.
func TestDialBackpressure(t *testing.T) {
	read := make(chan struct{})
	total := make(chan int64, 1)
	s := newSandbox(t, func(c halves) {
		<-read
		n, _ := io.Copy(io.Discard, c)
		total <- n
	}).serve(t)
	c := s.dial(t)
	const size = 64 << 20 // more than the buffers of a TCP connection hold
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(time.Second)))
	n, err := c.Write(make([]byte, size))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Positive(t, n)
	close(read)
	require.NoError(t, c.SetWriteDeadline(time.Time{}))
	_, err = c.Write(make([]byte, size-n))
	require.NoError(t, err)
	require.NoError(t, c.CloseWrite())
	require.EqualValues(t, size, <-total)
}

// TestDialReaderThatStops: the port is not read further than a window, and sees that its client leaves.
func TestDialReaderThatStops(t *testing.T) {
	sent := make(chan error, 1)
	s := newSandbox(t, func(c halves) {
		_, err := c.Write(make([]byte, 64<<20))
		sent <- err
	}).serve(t)
	c := s.dial(t)
	_, err := io.ReadFull(c, make([]byte, 1<<20))
	require.NoError(t, err)
	select {
	case err := <-sent:
		require.Fail(t, "bytes were buffered", "%v", err)
	default:
	}
	require.NoError(t, c.Close())
	require.Error(t, <-sent)
	require.Equal(t, codes.Canceled, status.Code(<-s.Ended))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = c.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	require.NoError(t, c.Close())
}

// TestDialDeadlines: a read that waits ends at its deadline, and the connection is as good as before.
func TestDialDeadlines(t *testing.T) {
	s := newSandbox(t, echo).serve(t)
	c := s.dial(t)
	require.NoError(t, c.SetDeadline(time.Unix(1, 0)))
	_, err := c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.SetDeadline(time.Time{}))
	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 1))
	require.NoError(t, err)
}
