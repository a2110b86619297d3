package density_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/density"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSum(t *testing.T) {
	const mib = 1 << 20
	r := &report.Report{}
	density.Sum(r, 1000*mib,
		density.Group{Name: "free_slot", Bodies: []int64{1 * mib, 2 * mib}, Shim: mib / 2, Shims: 1, Taken: 4 * mib},
		density.Group{Name: "claimed"},
		density.Group{Name: "cold", Bodies: []int64{3 * mib}, Shim: 7 * mib, Shims: 1, Taken: 5 * mib},
	)
	for key, want := range map[string]float64{
		"free_slot_mib": 2, "free_slot_shim_mib": 0.5, "free_slot_taken_mib": 4, "free_slot_fit": 250, "cold_mib": 10, "cold_fit": 100,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	_, ok := r.Number("claimed_mib")
	require.False(t, ok)
	require.Equal(t, []string{"free_slot", "cold"}, r.Figure.Groups)
	r.Judge(budget.Density("runc"))
	require.Equal(t, budget.Met, r.Budgets[0].Outcome)
}
