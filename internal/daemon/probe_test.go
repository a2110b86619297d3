package daemon_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestProbeCommand runs the probe of the kubelet: a process of the same program.
func TestProbeCommand(t *testing.T) {
	path := filepath.Join(t.TempDir(), "health.sock")
	status := health.NewServer()
	status.SetServingStatus("a.Service", healthv1.HealthCheckResponse_NOT_SERVING)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- rpc.ServeHealth(ctx, path, status) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	require.Eventually(t, func() bool { return rpc.Probe(ctx, path, "") == nil }, testkit.Timeout, testkit.Tick)
	self, err := os.Executable()
	require.NoError(t, err)
	for name, tt := range map[string]struct {
		args []string
		env  string
		code int
		text string
	}{
		"ready":              {[]string{"--health-socket", path}, "", 0, ""},
		"by environment":     {nil, path, 0, ""},
		"a service":          {[]string{"--service", "a.Service"}, path, 1, "test: probing: the status is NOT_SERVING"},
		"nothing listens":    {[]string{"--health-socket", path + "x"}, "", 1, "test: probing: asking " + path + "x"},
		"unknown flag":       {[]string{"--socket", path}, "", 2, "unknown flag: --socket"},
		"too many arguments": {[]string{"now"}, path, 1, "unknown command"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), self, append([]string{"probe"}, tt.args...)...)
			cmd.Env = []string{"FSB_HEALTH_SOCKET=" + tt.env}
			output, _ := cmd.CombinedOutput()
			require.Equal(t, tt.code, cmd.ProcessState.ExitCode(), "%s", output)
			require.Contains(t, string(output), tt.text)
		})
	}
}
