package app_test

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/app"
)

// TestShimsAreCollected: of two versions, the one that no agent uses is removed after the grace period.
func TestShimsAreCollected(t *testing.T) {
	dir, clock := t.TempDir(), clocktesting.NewFakeClock(time.Unix(1000, 0))
	unused, err := shim.Install(dir, []byte("old"), nil)
	require.NoError(t, err)
	unused.Close()
	used, err := shim.Install(dir, []byte("new"), nil)
	require.NoError(t, err)
	defer used.Close()
	collector := shim.NewCollector(shim.Config{Dir: dir, Grace: time.Minute, Clock: clock, InUse: func(context.Context, []string) (map[string]bool, error) {
		return nil, nil //nolint:nilnil // none
	}})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- app.CollectShims(ctx, collector, 10*time.Second, clock) }()
	begin := clock.Now()
	require.Eventually(t, func() bool {
		if clock.HasWaiters() {
			clock.Step(10 * time.Second)
		}
		_, err := os.Stat(unused.Path)
		return os.IsNotExist(err)
	}, testkit.Timeout, testkit.Tick)
	require.GreaterOrEqual(t, clock.Since(begin), time.Minute)
	_, err = os.Stat(used.Path)
	require.NoError(t, err)
	stop()
	require.NoError(t, <-done)
}
