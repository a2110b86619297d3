//go:build e2e

package main_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/run"
)

// TestNothingAcknowledgedIsLost runs the harness for two minutes with a fixed seed.
func TestNothingAcknowledgedIsLost(t *testing.T) {
	o := run.Defaults()
	o.Out = t.Output()
	o.LogFile = filepath.Join(t.TempDir(), "log")
	report, err := run.Run(t.Context(), o)
	require.NoError(t, err)
	_, _ = os.Stdout.WriteString(report.String() + "\n")
	require.Empty(t, report.Broken())
	require.True(t, report.Good(), "%s", report)
	require.GreaterOrEqual(t, report.Faults, 15)
	require.Positive(t, report.Running, "there must be sandboxes to audit")
	require.Equal(t, 2*time.Minute, o.Plan.Duration)
}
