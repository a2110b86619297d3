package create_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/durationpb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/create"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sampled(series map[string][]float64) *report.Report {
	r := &report.Report{Suite: "create"}
	for name, samples := range series {
		for i, x := range samples {
			r.Sample(name, i, r.Began, x, "ms", "")
		}
	}
	create.Sum(r)
	r.Judge(budget.Create("runc"))
	return r
}

// The keys are the issue's, to the letter.
func TestSum(t *testing.T) {
	r := sampled(map[string][]float64{
		create.Raw: {50, 40, 60}, create.Slot: {4, 5, 20}, create.Cold: {55, 55, 55}, create.Strong: {100}, create.Pod: {800, 1000, 1200}, create.Strayed: {60},
	})
	for key, want := range map[string]float64{
		"raw_p50_ms": 50, "slot_p50_ms": 5, "slot_p99_ms": 20, "cold_p50_ms": 55, "strong_p50_ms": 100, "pod_p50_ms": 1000,
		"slot_over_raw_p50": 0.1, "slot_over_raw_p99": 0.4, "cold_over_raw": 1.1, "cold_over_raw_p50": 1.1, "strong_over_pod": 0.1, "pod_over_slot": 200, "slot_went_cold": 1,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	require.Len(t, r.Figure.Lines, 6)
}

// Without slots there is no number of a slot, rather than a zero that would keep every budget.
func TestSumWithoutSlots(t *testing.T) {
	r := sampled(map[string][]float64{create.Raw: {50}, create.Cold: {55}, create.Strayed: {56, 57}, create.Strong: {100}, create.Pod: {1000}})
	for _, key := range []string{"slot_p50_ms", "slot_p99_ms", "slot_over_raw_p50", "slot_over_raw_p99", "pod_over_slot"} {
		_, ok := r.Number(key)
		require.False(t, ok, key)
	}
	strayed, _ := r.Number("slot_went_cold")
	require.InDelta(t, 2, strayed, 0)
	outcomes := map[string]budget.Outcome{}
	for _, v := range r.Budgets {
		outcomes[v.Key] = v.Outcome
	}
	require.Equal(t, budget.NotMeasured, outcomes["slot_over_raw_p50"])
	require.Equal(t, budget.Met, outcomes["cold_over_raw"])
	require.Equal(t, budget.Met, outcomes["strong_over_pod"])
}

func TestBreakdown(t *testing.T) {
	ms := func(x int) time.Duration { return time.Duration(x) * time.Millisecond }
	timing := func(name string, x int) *sandboxv1.StageTiming {
		return &sandboxv1.StageTiming{Stage: name, Duration: durationpb.New(ms(x))}
	}
	b := create.NewBreakdown()
	b.Add(ms(10), []*sandboxv1.StageTiming{timing("reserve", 1), timing("claim", 6)})
	b.Add(ms(12), []*sandboxv1.StageTiming{timing("reserve", 1), timing("claim", 7)})
	b.Add(ms(40), []*sandboxv1.StageTiming{timing("reserve", 1), timing("claim", 30), timing("claim", 4)})
	rows, over := b.Rows()
	require.Equal(t, []create.Stage{
		{Name: "reserve", N: 3, P50: 1, Mean: 1}, {Name: "claim", N: 3, P50: 7, Mean: 47.0 / 3}, {Name: "outside", N: 3, P50: 4, Mean: 4},
	}, withoutShares(rows))
	require.InDelta(t, 12.0/12, over, 1e-9)
	shares := 0.0
	for _, r := range rows {
		shares += r.Share
	}
	require.InDelta(t, 1, shares, 1e-9, "nothing is lost")
}

func withoutShares(rows []create.Stage) []create.Stage {
	var out []create.Stage
	for _, r := range rows {
		r.Share = 0
		out = append(out, r)
	}
	return out
}
