package obs_test

import (
	"context"
	"net"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestServeMetricsServesProfilesOnlyWhenEnabled(t *testing.T) {
	for name, profiling := range map[string]bool{"enabled": true, "disabled": false} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			address := l.Addr().String()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- obs.ServeMetrics(ctx, l, prometheus.NewRegistry(), profiling, nil) }()
			defer func() {
				cancel()
				require.NoError(t, <-ended)
			}()
			client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			status := func(path string) int {
				resp, err := client.Get("http://" + address + path)
				if err != nil {
					return 0
				}
				_ = resp.Body.Close()
				return resp.StatusCode
			}
			require.Eventually(t, func() bool { return status("/metrics") == http.StatusOK }, testkit.Timeout, testkit.Tick)
			want := http.StatusNotFound
			if profiling {
				want = http.StatusOK
			}
			require.Equal(t, want, status("/debug/pprof/heap?debug=1"))
		})
	}
}
