package rpc_test

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// relay passes connections on to a server until it is frozen: as a process that is stopped, it then accepts and reads, and nothing
// comes back.
type relay struct {
	listener net.Listener

	mu     sync.Mutex
	frozen bool
	opened int
	closed int
}

func newRelay(t *testing.T, server string) *relay {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{listener: l}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server)
			if err != nil {
				_ = in.Close()
				return
			}
			r.count(1, 0)
			wg.Go(func() { _, _ = io.Copy(out, in); _ = out.Close(); r.count(0, 1) })
			wg.Go(func() { _, _ = io.Copy(in, thawed{out, r}); _ = in.Close() })
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return r
}

// thawed reads nothing that came while the relay was frozen.
type thawed struct {
	net.Conn
	relay *relay
}

func (c thawed) Read(p []byte) (int, error) {
	for {
		n, err := c.Conn.Read(p)
		if !c.relay.isFrozen() || err != nil {
			return n, err
		}
	}
}

func (r *relay) count(opened, closed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.opened += opened
	r.closed += closed
}

func (r *relay) freeze(frozen bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frozen = frozen
}

func (r *relay) isFrozen() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.frozen
}

func (r *relay) counts() (opened, closed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.opened, r.closed
}

const quickSilence = 300 * time.Millisecond

// silent returns a client of a server behind a relay. Calls wait in the handler until slow is closed, if it is not nil.
func silent(t *testing.T, slow <-chan struct{}) (healthv1.HealthClient, *relay) {
	t.Helper()
	ca := pki.New(t)
	r := relayed(t, ca, slow)
	return dialSilent(t, ca, "passthrough:///"+r.listener.Addr().String(), quickSilence), r
}

// relayed returns a relay to a new server.
func relayed(t *testing.T, ca *pki.Authority, slow <-chan struct{}) *relay {
	t.Helper()
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAllocator), DrainTimeout: 10 * time.Millisecond,
		Unary: []grpc.UnaryServerInterceptor{func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			if slow != nil {
				<-slow
			}
			return h(ctx, req)
		}},
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	return newRelay(t, server.Addr().String())
}

func dialSilent(t *testing.T, ca *pki.Authority, target string, limit time.Duration, options ...grpc.DialOption) healthv1.HealthClient {
	t.Helper()
	conn, err := rpc.Dial(target, rpc.ClientConfig{
		TLS: ca.TLS(t, rpc.RoleGateway), ServerName: rpc.RoleAllocator.ServerName(), Silence: limit, Options: options,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return healthv1.NewHealthClient(conn)
}

func check(ctx context.Context, c healthv1.HealthClient) error {
	_, err := c.Check(ctx, &healthv1.HealthCheckRequest{})
	return err
}

// TestStoppedServer: a call to a server that does not say that it has received the call fails soon, and the next one uses another
// connection.
func TestStoppedServer(t *testing.T) {
	client, r := silent(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	require.NoError(t, check(ctx, client))
	r.freeze(true)
	began := time.Now()
	err := check(ctx, client)
	require.Equal(t, codes.Unavailable, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "does not answer")
	require.GreaterOrEqual(t, time.Since(began), quickSilence)
	require.Eventually(t, func() bool { _, closed := r.counts(); return closed == 1 }, testkit.Timeout, testkit.Tick, "the connection is closed")
	r.freeze(false)
	require.Eventually(t, func() bool { return check(ctx, client) == nil }, testkit.Timeout, testkit.Tick)
	opened, _ := r.counts()
	require.Greater(t, opened, 1)
}

// TestStoppedServerAmongOthers: only the connection to the server that stopped is closed, and calls to the other one succeed.
func TestStoppedServerAmongOthers(t *testing.T) {
	ca := pki.New(t)
	stopped, other := relayed(t, ca, nil), relayed(t, ca, nil)
	servers := manual.NewBuilderWithScheme("two")
	servers.InitialState(resolver.State{Addresses: []resolver.Address{
		{Addr: stopped.listener.Addr().String()}, {Addr: other.listener.Addr().String()},
	}})
	// A busy machine must not make the other server silent.
	client := dialSilent(t, ca, "two:///", 5*quickSilence, grpc.WithResolvers(servers),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`))
	answered := map[string]bool{}
	require.Eventually(t, func() bool {
		var p peer.Peer
		_, err := client.Check(t.Context(), &healthv1.HealthCheckRequest{}, grpc.Peer(&p))
		require.NoError(t, err)
		answered[p.Addr.String()] = true
		return len(answered) == 2
	}, testkit.Timeout, testkit.Tick)
	stopped.freeze(true)
	failed := 0
	for range 3 {
		if err := check(t.Context(), client); err != nil {
			require.ErrorContains(t, err, "does not answer")
			failed++
		}
	}
	require.NotZero(t, failed)
	require.Less(t, failed, 3)
	opened, closed := other.counts()
	require.Equal(t, []int{1, 0}, []int{opened, closed})
	require.Eventually(t, func() bool { _, closed := stopped.counts(); return closed > 0 }, testkit.Timeout, testkit.Tick)
}

// TestSlowHandler: a call whose handler takes long is not one that the server has not received.
func TestSlowHandler(t *testing.T) {
	slow := make(chan struct{})
	client, r := silent(t, slow)
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	for range 2 { // also by the first call, which proves that the server says so
		done := make(chan error, 1)
		go func() { done <- check(ctx, client) }()
		select {
		case err := <-done:
			require.Fail(t, "the call ended", "%v", err)
		case <-time.After(2 * quickSilence):
		}
		slow <- struct{}{}
		require.NoError(t, <-done)
	}
	opened, _ := r.counts()
	require.Equal(t, 1, opened)
	close(slow)
}

// TestCallerLeavesSilentServer: the end of the caller's context is not the server's failure.
func TestCallerLeavesSilentServer(t *testing.T) {
	client, r := silent(t, nil)
	require.NoError(t, check(t.Context(), client))
	r.freeze(true)
	ctx, cancel := context.WithTimeout(t.Context(), quickSilence/3)
	defer cancel()
	require.Equal(t, codes.DeadlineExceeded, status.Code(check(ctx, client)))
}

// TestServerThatSaysNothing: a server of an earlier release answers when it is done.
func TestServerThatSaysNothing(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer()
	healthv1.RegisterHealthServer(server, late{})
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	conn, err := rpc.Dial("passthrough:///"+l.Addr().String(), rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Silence: quickSilence})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Timeout)
	defer cancel()
	for range 2 {
		require.NoError(t, check(ctx, healthv1.NewHealthClient(conn)))
	}
}

// late answers after more than the silence that clients accept.
type late struct {
	healthv1.UnimplementedHealthServer
}

func (late) Check(context.Context, *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	<-time.After(2 * quickSilence)
	return &healthv1.HealthCheckResponse{}, nil
}
