package rpc_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// TestLimitedListener: connections beyond the limit are closed at once, and count no longer once they have ended.
func TestLimitedListener(t *testing.T) {
	for name, limits := range map[string][2]int{"in all": {2, 9}, "of one host": {9, 2}} {
		t.Run(name, func(t *testing.T) {
			inner, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			require.NoError(t, err)
			l := rpc.Limit(inner, limits[0], limits[1])
			accepted := make(chan net.Conn)
			go func() {
				defer close(accepted)
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					accepted <- c
				}
			}()
			t.Cleanup(func() { require.NoError(t, l.Close()); <-accepted })
			dial := func() net.Conn {
				c, err := (&net.Dialer{Timeout: testkit.Timeout}).DialContext(t.Context(), "tcp", inner.Addr().String())
				require.NoError(t, err)
				t.Cleanup(func() { _ = c.Close() })
				return c
			}
			dial()
			dial()
			first, second := <-accepted, <-accepted
			t.Cleanup(func() { _ = second.Close() })
			refused := dial()
			require.NoError(t, refused.SetReadDeadline(time.Now().Add(testkit.Timeout)))
			_, err = refused.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)

			require.NoError(t, first.Close())
			_ = first.Close() // counts once
			dial()
			third := <-accepted
			t.Cleanup(func() { _ = third.Close() })
			again := dial()
			require.NoError(t, again.SetReadDeadline(time.Now().Add(testkit.Timeout)))
			_, err = again.Read(make([]byte, 1))
			require.ErrorIs(t, err, io.EOF)
		})
	}
}

// TestListenerLimitsTheRate: an address that opens connections as fast as it can has them closed, until it has waited.
func TestListenerLimitsTheRate(t *testing.T) {
	inner, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := rpc.Limit(inner, 10, 10)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte{1})
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { require.NoError(t, l.Close()); <-ended })
	served := func() bool {
		c, err := (&net.Dialer{Timeout: testkit.Timeout}).DialContext(t.Context(), "tcp", inner.Addr().String())
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		_, err = io.ReadFull(c, make([]byte, 1))
		return err == nil
	}
	n := 0
	for served() {
		n++
		require.Less(t, n, 100_000)
	}
	require.GreaterOrEqual(t, n, 1000)
	require.Eventually(t, served, testkit.Timeout, testkit.Tick)
}

// TestStrangersLimitTheRate: an address whose connections lack valid credentials may open far fewer of them.
func TestStrangersLimitTheRate(t *testing.T) {
	inner, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	l := rpc.Limit(inner, 10, 10)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	var strange atomic.Int64
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			calls := 1
			for !rpc.Strange(c) {
				calls++
			}
			if calls == 16 {
				strange.Add(1)
			}
			_ = c.Close()
		}
	}()
	for range 400 {
		c, err := (&net.Dialer{Timeout: testkit.Timeout}).DialContext(t.Context(), "tcp", inner.Addr().String())
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1)) // it is accepted and closed
		require.Error(t, err)
		_ = c.Close()
	}
	require.Positive(t, strange.Load())
	require.Less(t, strange.Load(), int64(100))
	require.False(t, rpc.Strange(nil), "a connection of another listener")
}

// limited serves with limits and returns a client, and the relay that counts its connections.
func limited(t *testing.T, limits rpc.Limits) (healthv1.HealthClient, *relay) {
	t.Helper()
	ca := pki.New(t)
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
		Address: "127.0.0.1:0", TLS: ca.TLS(t, rpc.RoleAllocator), DrainTimeout: 10 * time.Millisecond, Limits: limits,
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	r := newRelay(t, server.Addr().String())
	return dialSilent(t, ca, "passthrough:///"+r.listener.Addr().String(), testkit.Timeout), r
}

// TestConnectionAge: calls succeed while the server ends the connections that they are made on.
func TestConnectionAge(t *testing.T) {
	limits := rpc.DefaultLimits()
	limits.Age, limits.Grace = 50*time.Millisecond, time.Second
	client, r := limited(t, limits)
	require.Eventually(t, func() bool {
		require.NoError(t, check(t.Context(), client))
		opened, _ := r.counts()
		return opened >= 3
	}, testkit.Timeout, testkit.Tick)
}

// TestSilentHandshake: who connects and says nothing is disconnected.
func TestSilentHandshake(t *testing.T) {
	limits := rpc.DefaultLimits()
	limits.Handshake = 100 * time.Millisecond
	client, r := limited(t, limits)
	require.NoError(t, check(t.Context(), client))
	c, err := (&net.Dialer{Timeout: testkit.Timeout}).DialContext(t.Context(), "tcp", r.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	require.NoError(t, c.SetReadDeadline(time.Now().Add(testkit.Timeout)))
	_, err = io.Copy(io.Discard, c)
	require.NoError(t, err, "the server closes the connection")
}
