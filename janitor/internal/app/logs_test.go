package app_test

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
)

// TestLogsAreBoundedWithoutAnAgent has a sandbox that writes on, and no agent.
func TestLogsAreBoundedWithoutAnAgent(t *testing.T) {
	const limit, id = 64 << 10, "00000000-0000-0000-0000-000000000001-1"
	root := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(root, id), 0o700))
	path := filepath.Join(root, id, ctrd.OutputFile)
	require.NoError(t, os.WriteFile(filepath.Join(root, id, ctrd.LimitFile), []byte("65536"), 0o600))
	out, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	require.NoError(t, err)
	defer out.Close()
	clock := clocktesting.NewFakeClock(time.Unix(1000, 0))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- app.TrimLogs(ctx, root, clock) }()
	for range 8 {
		_, err := out.Write(make([]byte, 4*limit))
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			clock.Step(time.Second)
			var st syscall.Stat_t
			return syscall.Stat(path, &st) == nil && st.Blocks*512 <= 2*limit
		}, testkit.Timeout, testkit.Tick)
	}
	stop()
	require.NoError(t, <-done)
}
