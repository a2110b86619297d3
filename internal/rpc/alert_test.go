package rpc_test

import (
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// lateWriter is a client's connection that writes nothing after its handshake until the server has closed its side: the
// order of events in which the first write fails and the server's alert has not been read.
type lateWriter struct {
	net.Conn
	closed <-chan struct{}
	writes atomic.Int32
}

// handshakeWrites is how many writes a TLS 1.3 client needs: the hello, and its certificate with the rest.
const handshakeWrites = 2

func (c *lateWriter) Write(p []byte) (int, error) {
	if c.writes.Add(1) <= handshakeWrites {
		return c.Conn.Write(p)
	}
	<-c.closed
	for { // the server's host answers the first write with a reset; a later one fails
		if n, err := c.Conn.Write(p); err != nil {
			return n, err
		}
	}
}

// Read holds back what the server sends after the handshake until the server has closed.
func (c *lateWriter) Read(p []byte) (int, error) {
	if c.writes.Load() >= handshakeWrites {
		<-c.closed
	}
	return c.Conn.Read(p)
}

// TestClientReportsTheServersAlert has a server refuse the client's certificate, which a TLS 1.3 client learns after its own
// handshake has succeeded. The client must report the alert, not the broken pipe of its first write.
func TestClientReportsTheServersAlert(t *testing.T) {
	ca, other := pki.New(t), pki.New(t)
	config, err := ca.TLS(t, rpc.RoleAllocator).ServerConfig(false)
	require.NoError(t, err)
	var listen net.ListenConfig
	l, err := listen.Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := make(chan struct{})
	served := make(chan error, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			served <- err
			return
		}
		served <- tls.Server(raw, config).HandshakeContext(t.Context())
		_ = raw.Close()
		close(closed)
	}()
	t.Cleanup(func() { _ = l.Close() })

	client := other.User(t, "alice")
	client.CAFile = ca.User(t, "alice").CAFile
	conn, err := rpc.Dial("passthrough:///"+l.Addr().String(), rpc.ClientConfig{
		TLS: client, ServerName: rpc.RoleAllocator.ServerName(),
		Options: []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, err
			}
			return &lateWriter{Conn: raw, closed: closed}, nil
		})},
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	_, err = healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{})
	require.ErrorContains(t, err, "remote error: tls:")
	require.Error(t, <-served)
}
