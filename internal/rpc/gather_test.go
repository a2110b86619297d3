package rpc_test

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/credentials"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// countedConn counts writes. Once broken is set, they fail.
type countedConn struct {
	net.Conn
	writes atomic.Int64
	broken atomic.Bool
}

func (c *countedConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	if c.broken.Load() {
		return 0, io.ErrClosedPipe
	}
	return c.Conn.Write(p)
}

// gathered returns both ends of a TLS connection that gathers, and what is below the first one.
func gathered(t *testing.T) (client, server net.Conn, below *countedConn) {
	t.Helper()
	files := pki.New(t).TLS(t, rpc.RoleGateway)
	cert, err := tls.LoadX509KeyPair(files.CertFile, files.KeyFile)
	require.NoError(t, err)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	accepted := make(chan net.Conn, 1)
	go func() {
		raw, err := l.Accept()
		if err == nil {
			raw, _, err = rpc.Gathered(credentials.NewTLS(&tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}})).ServerHandshake(raw)
		}
		if err != nil {
			raw = nil
		}
		accepted <- raw
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	below = &countedConn{Conn: raw}
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	insecure := credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})
	client, _, err = rpc.Gathered(insecure).Clone().ClientHandshake(ctx, "test", below)
	require.NoError(t, err)
	server = <-accepted
	require.NotNil(t, server)
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	return client, server, below
}

// TestGatheredWrites: all bytes arrive in order, whatever the sizes of the writes, also while the other side writes; one write of a client is one of the
// connection below.
func TestGatheredWrites(t *testing.T) {
	client, server, below := gathered(t)
	sizes := []int{1, 9, 16 << 10, 16<<10 + 1, 40_000, 64 << 10, 5, 300_000, 64<<10 + 9}
	total := 0
	for _, n := range sizes {
		total += n
	}
	content := make([]byte, total)
	_, err := rand.Read(content)
	require.NoError(t, err)
	var wg sync.WaitGroup
	for _, ends := range [][2]net.Conn{{client, server}, {server, client}} {
		wg.Go(func() {
			rest := content
			for _, n := range sizes {
				if _, err := ends[0].Write(rest[:n]); err != nil {
					t.Error(err)
				}
				rest = rest[n:]
			}
		})
		wg.Go(func() {
			got := make([]byte, total)
			if _, err := io.ReadFull(ends[1], got); err != nil {
				t.Error(err)
			}
			if string(got) != string(content) {
				t.Error("other bytes have arrived")
			}
		})
	}
	wg.Wait()
	go func() { _, _ = io.Copy(io.Discard, server) }()
	for range 10 { // the first records of a connection are small
		_, err := client.Write(content[:64<<10])
		require.NoError(t, err)
	}
	before := below.writes.Load()
	_, err = client.Write(content[:64<<10])
	require.NoError(t, err)
	require.EqualValues(t, 1, below.writes.Load()-before)
}

// TestGatheredWriteFails: an error of the connection below is that of the write, and of all after it; a close ends a write that waits.
func TestGatheredWriteFails(t *testing.T) {
	client, _, below := gathered(t)
	below.broken.Store(true)
	_, err := client.Write(make([]byte, 64<<10))
	require.Error(t, err)
	below.broken.Store(false)
	_, err = client.Write(make([]byte, 64<<10))
	require.Error(t, err)

	client, _, _ = gathered(t)
	done := make(chan error, 1)
	go func() {
		var err error
		for err == nil { // until the buffers of the kernel are full
			_, err = client.Write(make([]byte, 64<<10))
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatal("a write that nothing reads has ended", err)
	case <-time.After(200 * time.Millisecond):
	}
	closed := time.Now()
	require.NoError(t, client.Close())
	require.Less(t, time.Since(closed), 4*time.Second, "TLS would wait for 5 s")
	select {
	case err := <-done:
		require.Error(t, err)
	case <-time.After(testkit.Timeout):
		t.Fatal("a write does not end with its connection")
	}
}
