package components

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/network"
)

const checkTimeout = 3 * time.Second

// Check probes a component once and returns nil if it is healthy. It needs the cluster's network namespace.
func (c Config) Check(ctx context.Context, probe Probe) error {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	if probe.Socket != "" {
		return checkSocket(ctx, probe.Socket)
	}
	authorities := x509.NewCertPool()
	if raw, err := os.ReadFile(c.CA()); err == nil {
		authorities.AppendCertsFromPEM(raw)
	}
	transport := &http.Transport{
		DialContext:       network.Dial,
		TLSClientConfig:   &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12},
		DisableKeepAlives: true,
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, probe.URL, nil)
	if err != nil {
		return fmt.Errorf("making a probe: %w", err)
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return fmt.Errorf("probing %s: %w", probe.URL, err)
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK {
		body, _ := io.ReadAll(io.LimitReader(response.Body, 2048))
		return fmt.Errorf("probing %s: %s: %s", probe.URL, response.Status, reason(string(body)))
	}
	return nil
}

// reason picks the lines of a Kubernetes health report that are bad ("[-]etcd failed: ..."), or else the last one.
func reason(report string) string {
	lines := strings.Split(strings.TrimSpace(report), "\n")
	var bad []string
	for _, line := range lines {
		if strings.HasPrefix(line, "[-]") {
			bad = append(bad, line)
		}
	}
	if len(bad) == 0 {
		return lines[len(lines)-1]
	}
	return strings.Join(bad, ", ")
}

func checkSocket(ctx context.Context, socket string) error {
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("probing %s: %w", socket, err)
	}
	defer func() { _ = conn.Close() }()
	answer, err := healthpb.NewHealthClient(conn).Check(ctx, &healthpb.HealthCheckRequest{})
	if err != nil {
		return fmt.Errorf("probing %s: %w", socket, err)
	}
	if answer.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return fmt.Errorf("probing %s: %s", socket, answer.GetStatus())
	}
	return nil
}
