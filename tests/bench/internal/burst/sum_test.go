package burst_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/burst"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSum(t *testing.T) {
	r := &report.Report{}
	for i, x := range []float64{50, 60, 40} {
		r.Sample(burst.RawSeries, i, r.Began, x, "ms", "")
	}
	burst.Sum(r, []burst.Burst{
		{Name: "none", Millis: []float64{100, 200}, Done: []float64{100, 200}, Paths: map[string]int{"cold": 2}, Wall: 200 * time.Millisecond},
		{Name: "half", Slots: 1, Kept: 0, Millis: []float64{90, 95}, Done: []float64{90, 95}, Wall: 95 * time.Millisecond},
		{Name: "all", Slots: 2, Kept: 2, Millis: []float64{5, 80}, Done: []float64{80, 5}, Wall: 80 * time.Millisecond, Refill: 10, RefillTime: time.Second, Paths: map[string]int{"slot": 2}},
	})
	for key, want := range map[string]float64{
		"raw_p50_ms": 50, "none_p50_ms": 100, "none_p99_ms": 200, "none_per_s": 10, "all_p50_ms": 5, "all_p99_ms": 80, "all_per_s": 25,
		"all_refill_per_s": 10, "all_p99_over_raw_p50": 1.6,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	for _, key := range []string{"half_p50_ms", "half_p99_over_raw_p50", "none_refill_per_s"} {
		_, ok := r.Number(key)
		require.False(t, ok, "%s: it had no slots", key)
	}
	require.Len(t, r.Tables[0].Rows, 3)
	require.Equal(t, [][2]float64{{5, 1}, {80, 2}}, r.Figure.Lines[2].Points, "in the order of the answers")
	r.Judge(budget.Burst())
	require.Equal(t, budget.Met, r.Budgets[0].Outcome)
}
