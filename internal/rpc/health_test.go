package rpc_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestProbe: a probe reaches the health service by a socket that no other user can open, and that a killed process has left.
func TestProbe(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run", "health.sock")
	require.Error(t, rpc.Probe(t.Context(), path, ""), "nothing listens")
	status := health.NewServer()
	status.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	serve := func() (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- rpc.ServeHealth(ctx, path, status) }()
		require.Eventually(t, func() bool { _, err := os.Stat(path); return err == nil }, testkit.Timeout, testkit.Tick)
		return func() { cancel(); require.NoError(t, <-done) }
	}
	stop := serve()
	require.ErrorContains(t, rpc.Probe(t.Context(), path, ""), "NOT_SERVING")
	status.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	require.NoError(t, rpc.Probe(t.Context(), path, ""))
	require.ErrorContains(t, rpc.Probe(t.Context(), path, "other.Service"), "unknown service")
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	require.NoError(t, os.Rename(path, path+".left"))
	stop()
	require.NoError(t, os.Rename(path+".left", path))
	require.Error(t, rpc.Probe(t.Context(), path, ""), "nothing listens any longer")

	stop = serve()
	require.Eventually(t, func() bool { return rpc.Probe(t.Context(), path, "") == nil }, testkit.Timeout, testkit.Tick)
	stop()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.ErrorContains(t, rpc.ServeHealth(t.Context(), path, status), "is not a socket")
}
