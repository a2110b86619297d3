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
	}, &burst.Burst{Name: "drain", Slots: 64, Kept: 64, Missing: 32, Refill: 120, RefillTime: time.Second})
	for key, want := range map[string]float64{
		"raw_p50_ms": 50, "none_p50_ms": 100, "none_p99_ms": 200, "none_per_s": 10, "all_p50_ms": 5, "all_p99_ms": 80, "all_per_s": 25,
		"all_refill_per_s": 10, "all_p99_over_raw_p50": 1.6, "none_p99_over_raw_p50": 4,
		"refill_per_s": 120, "refill_missing": 32,
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
	for handler, budgets := range map[string]int{"runc": 1, budget.Own: 3} {
		r.Judge(budget.Burst(handler))
		require.Len(t, r.Budgets, budgets)
		require.NoError(t, budget.Check(r.Budgets), handler)
	}
}

// Without the slots, or with most of them back already when the last create was answered, a rate would be one of something else.
func TestSumOfRefills(t *testing.T) {
	for name, drained := range map[string]*burst.Burst{
		"not measured":           nil,
		"slots never came":       {Slots: 64, Kept: 60, Missing: 60, Refill: 100},
		"most were there before": {Slots: 64, Kept: 64, Missing: 31, Refill: 100},
	} {
		r := &report.Report{}
		burst.Sum(r, nil, drained)
		_, ok := r.Number("refill_per_s")
		require.False(t, ok, name)
	}
}
