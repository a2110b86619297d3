package rpc_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net/url"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// TestAgentIdentity: a client that means one agent speaks to no other, whatever answers at the address.
func TestAgentIdentity(t *testing.T) {
	ca := pki.New(t)
	id := rpc.AgentID{Namespace: "ns", Pod: "pod", UID: "uid"}
	other := id
	other.UID = "other"
	for name, tt := range map[string]struct {
		server rpc.TLS
		want   bool
	}{
		"the agent":                     {ca.Agent(t, id), true},
		"another agent":                 {ca.Agent(t, other), false},
		"a certificate of all agents":   {ca.TLS(t, rpc.RoleAgent), false},
		"another component":             {ca.TLS(t, rpc.RoleAllocator), false},
		"an agent of another authority": {withCA(pki.New(t).Agent(t, id), ca.TLS(t, rpc.RoleAgent).CAFile), false},
	} {
		t.Run(name, func(t *testing.T) {
			server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{
				Address: "127.0.0.1:0", TLS: tt.server, DrainTimeout: time.Second, Allow: everything(rpc.RoleAllocator),
			})
			require.NoError(t, err)
			sandboxv1.RegisterSandboxServiceServer(server, sandboxes{})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- server.Run(ctx) }()
			t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
			call, stop := context.WithTimeout(t.Context(), 5*time.Second)
			defer stop()
			_, err = dial(t, server, rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleAllocator), AgentUID: "uid"}).
				GetSandbox(call, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
			if tt.want {
				require.NoError(t, err)
				return
			}
			require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)), "%v", err)
		})
	}
}

// TestAgentIsNoClient: the certificate of an agent opens no server.
func TestAgentIsNoClient(t *testing.T) {
	ca := pki.New(t)
	server := serve(t, t.Context(), ca)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err := dial(t, server, rpc.ClientConfig{TLS: ca.Agent(t, rpc.AgentID{Namespace: "ns", Pod: "pod", UID: "uid"}), ServerName: rpc.RoleAllocator.ServerName()}).
		GetSandbox(ctx, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
	require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)), "%v", err)
}

// TestCertificatesAreOfOneSide: the certificate of a server opens no other server, and that of a client serves nothing, although both
// name the same role.
func TestCertificatesAreOfOneSide(t *testing.T) {
	ca := pki.New(t)
	allocator, controller := ca.TLS(t, rpc.RoleAllocator), ca.TLS(t, rpc.RoleController)
	asServer := func(files rpc.TLS) rpc.TLS {
		return rpc.TLS{CertFile: files.CertFile, KeyFile: files.KeyFile, CAFile: files.CAFile}
	}
	asClient := func(files rpc.TLS) rpc.TLS {
		return rpc.TLS{CertFile: files.ClientCertFile, KeyFile: files.ClientKeyFile, CAFile: files.CAFile}
	}
	for name, tt := range map[string]struct {
		server, client rpc.TLS
		want           bool
	}{
		"each for its side":           {asServer(allocator), asClient(controller), true},
		"both, and each for its side": {allocator, controller, true},
		"a server as a client":        {allocator, asServer(controller), false},
		"a client as a server":        {asClient(allocator), controller, false},
	} {
		t.Run(name, func(t *testing.T) {
			server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{Address: "127.0.0.1:0", TLS: tt.server, DrainTimeout: time.Second, Allow: everything(rpc.RoleController)})
			require.NoError(t, err)
			sandboxv1.RegisterSandboxServiceServer(server, sandboxes{})
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- server.Run(ctx) }()
			t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
			call, stop := context.WithTimeout(t.Context(), 5*time.Second)
			defer stop()
			_, err = dial(t, server, rpc.ClientConfig{TLS: tt.client, ServerName: rpc.RoleAllocator.ServerName()}).
				GetSandbox(call, &sandboxv1.GetSandboxRequest{Namespace: "ns", Name: "a"})
			if tt.want {
				require.NoError(t, err)
				return
			}
			require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)), "%v", err)
		})
	}
}

// TestAgentCertificateIsReplaced: a running agent serves a new certificate to the next connection, and continues the streams of the
// earlier ones.
func TestAgentCertificateIsReplaced(t *testing.T) {
	ca := pki.New(t)
	id := rpc.AgentID{Namespace: "ns", Pod: "pod", UID: "uid"}
	files := ca.Agent(t, id)
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{Address: "127.0.0.1:0", TLS: files, DrainTimeout: time.Second, Allow: everything(rpc.RoleAllocator)})
	require.NoError(t, err)
	echo := slow{release: make(chan struct{})}
	sandboxv1.RegisterSandboxServiceServer(server, echo)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	caller := rpc.ClientConfig{TLS: ca.TLS(t, rpc.RoleAllocator), AgentUID: id.UID}

	stream, err := dial(t, server, caller).WatchSandboxes(t.Context(), &sandboxv1.WatchSandboxesRequest{})
	require.NoError(t, err)
	_, err = stream.Recv()
	require.NoError(t, err)
	serial := func() *big.Int {
		config, err := caller.TLS.ClientConfig(rpc.RoleAgent.ServerName())
		require.NoError(t, err)
		config.NextProtos = []string{"h2"}
		conn, err := (&tls.Dialer{Config: config}).DialContext(t.Context(), "tcp", server.Addr().String())
		require.NoError(t, err)
		defer func() { require.NoError(t, conn.Close()) }()
		return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber
	}
	first := serial()
	require.Equal(t, files, ca.Agent(t, id), "the same files")
	require.Eventually(t, func() bool { return serial().Cmp(first) != 0 }, testkit.Timeout, 100*time.Millisecond)
	close(echo.release)
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF, "the stream ends when its handler does")
}

func TestAgentOf(t *testing.T) {
	for text, want := range map[string]rpc.AgentID{
		"spiffe://agent.fast-sandbox.io/ns/pod/uid":      {Namespace: "ns", Pod: "pod", UID: "uid"},
		"spiffe://agent.fast-sandbox.io/ns/pod":          {},
		"spiffe://agent.fast-sandbox.io/ns//uid":         {},
		"spiffe://agent.fast-sandbox.io/ns/pod/uid/more": {},
		"spiffe://fast-sandbox.io/ns/pod/uid":            {},
		"https://agent.fast-sandbox.io/ns/pod/uid":       {},
		"spiffe://fast-sandbox.io/agent":                 {},
	} {
		u, err := url.Parse(text)
		require.NoError(t, err)
		cert := &x509.Certificate{URIs: []*url.URL{u}}
		got, ok := rpc.AgentOf(cert)
		require.Equal(t, want, got, text)
		require.Equal(t, want != rpc.AgentID{}, ok, text)
		if ok {
			require.Equal(t, text, got.URI().String())
			require.True(t, rpc.HasRole(cert, rpc.RoleAgent))
		}
	}
}
