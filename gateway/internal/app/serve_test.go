package app_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestConfigNamesEveryProblem(t *testing.T) {
	c := app.Config{MaxBodyBytes: -1, DrainTimeout: -1}
	err := c.Validate()
	for _, flag := range []string{"--tls-cert-file", "--tls-key-file", "--tls-ca-file", "--bind-address", "--allocator-address", "--gc-address", "--max-body-bytes", "--request-timeout", "--drain-timeout"} {
		require.ErrorContains(t, err, flag)
	}
}

// TestHTTP1KeepsItsConnection sends requests over one HTTP/1.1 connection: the deadline of one must not end the next.
func TestHTTP1KeepsItsConnection(t *testing.T) {
	g := start(t, &fake{list: func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		return &sandboxv1.ListSandboxesResponse{}, nil
	}})
	cfg, err := g.authority.User(t, "alice").ClientConfig(rpc.RoleGateway.ServerName())
	require.NoError(t, err)
	connections := 0
	transport := &http.Transport{TLSClientConfig: cfg, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		connections++
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}}
	defer transport.CloseIdleConnections()
	g.client = &http.Client{Transport: transport}
	for range 3 {
		a := g.do(t, "GET", collection, "")
		require.Equal(t, http.StatusOK, a.code)
		require.Equal(t, 1, a.proto)
	}
	require.Equal(t, 1, connections)
}

func TestMetrics(t *testing.T) {
	metrics := listen(t)
	address := metrics.Addr().String()
	require.NoError(t, metrics.Close())
	g := start(t, &fake{list: func(context.Context, *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
		return &sandboxv1.ListSandboxesResponse{}, nil
	}}, func(c *app.Config) { c.MetricsAddress = address })
	g.do(t, "GET", collection, "")
	g.do(t, "GET", "/unknown/path", "")
	g.do(t, "FROB", collection, "")
	var body string
	secure, err := g.authority.TLS(t, rpc.RoleMetrics).ClientConfig(rpc.RoleGateway.ServerName())
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", nil)
		require.NoError(t, err)
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: secure}}).Do(req)
		if err != nil {
			return false
		}
		defer func() { _ = resp.Body.Close() }()
		raw, err := io.ReadAll(resp.Body)
		body = string(raw)
		return err == nil
	}, testkit.Timeout, testkit.Tick)
	require.Contains(t, body, `fastsandbox_gateway_requests_total{code="200",method="GET",route="/v1/namespaces/{namespace=*}/sandboxes"} 1`)
	require.Contains(t, body, `method="other",route="unmatched"`)
	require.NotContains(t, body, "unknown/path", "labels are bounded")
	require.Contains(t, body, "fastsandbox_gateway_streams 0")
}

// TestSlowBodyHoldsNoCall sends half a body and disconnects: the allocator receives no call.
func TestSlowBodyHoldsNoCall(t *testing.T) {
	g := start(t, &fake{}) // a call panics
	cfg, err := g.authority.User(t, "alice").ClientConfig(rpc.RoleGateway.ServerName())
	require.NoError(t, err)
	cfg.NextProtos = []string{"http/1.1"}
	conn, err := (&tls.Dialer{Config: cfg}).DialContext(t.Context(), "tcp", g.address)
	require.NoError(t, err)
	_, err = fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{\"name\":", collection)
	require.NoError(t, err)
	require.NoError(t, conn.Close())
	require.Equal(t, http.StatusOK, g.do(t, "GET", "/healthz", "").code)
}

// TestCertificatesAreReloaded replaces the gateway's certificate while it runs.
func TestCertificatesAreReloaded(t *testing.T) {
	g := start(t, &fake{})
	require.Equal(t, http.StatusOK, g.do(t, "GET", "/healthz", "").code)
	files := g.authority.TLS(t, rpc.RoleGateway) // issues a new one into the same files
	before, err := os.ReadFile(files.CertFile)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		cfg, err := g.authority.User(t, "alice").ClientConfig(rpc.RoleGateway.ServerName())
		require.NoError(t, err)
		conn, err := (&tls.Dialer{Config: cfg}).DialContext(t.Context(), "tcp", g.address)
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close() }()
		shown, ok := conn.(*tls.Conn)
		return ok && string(pemOf(shown.ConnectionState().PeerCertificates[0].Raw)) == string(before)
	}, testkit.Timeout, 100*time.Millisecond) // certificates are checked once a second
}
