package run_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/run"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestUnknownPart(t *testing.T) {
	require.Subset(t, run.PartNames(), []string{"proof", "sandbox", "image", "caller", "agent", "bomb", "flood", "squat"})
	_, err := run.Run(t.Context(), run.Options{Only: []string{"nothing"}})
	require.ErrorContains(t, err, "nothing")
	_, err = run.Run(t.Context(), run.Options{Bin: t.TempDir()})
	require.ErrorContains(t, err, "hostile program")
}
