package daemon_test

import (
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
)

// TestMetricsAreForTheirRole: neither a user nor another component reads metrics.
func TestMetricsAreForTheirRole(t *testing.T) {
	ca := pki.New(t)
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	var g daemon.Group
	common := daemon.Common{TLS: ca.TLS(t, rpc.RoleAllocator), MetricsAddress: address, HealthSocket: "0"}
	common.Serve(&g, prometheus.NewRegistry(), health.NewServer())
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-ended) })

	get := func(files rpc.TLS) (int, error) {
		cfg, err := files.ClientConfig(rpc.RoleAllocator.ServerName())
		require.NoError(t, err)
		client := http.Client{Transport: &http.Transport{TLSClientConfig: cfg, DisableKeepAlives: true}}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", nil)
		require.NoError(t, err)
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		return resp.StatusCode, resp.Body.Close()
	}
	reader := ca.TLS(t, rpc.RoleMetrics)
	require.Eventually(t, func() bool {
		code, err := get(reader)
		return err == nil && code == http.StatusOK
	}, testkit.Timeout, testkit.Tick)
	for name, files := range map[string]rpc.TLS{
		"another component": ca.TLS(t, rpc.RoleAgent), "a user": ca.User(t, "alice"), "no certificate": {CAFile: reader.CAFile},
	} {
		_, err := get(files)
		require.ErrorContains(t, err, "tls:", name)
	}
}
