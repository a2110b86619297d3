package budget_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestJudge(t *testing.T) {
	bounded := budget.Budget{Key: "x", Limit: 2, Aim: 1, What: "it"}
	between := budget.Budget{Key: "x", Limit: 1.1, Least: 0.9}
	none := budget.Budget{Key: "x", Limit: 0}
	atLeast := budget.Budget{Key: "x", Least: 4, AtLeast: true}
	tests := []struct {
		name   string
		budget budget.Budget
		values map[string]float64
		want   budget.Outcome
		aim    bool
	}{
		{"at the aim", bounded, map[string]float64{"x": 1}, budget.Met, true},
		{"between aim and limit", bounded, map[string]float64{"x": 1.5}, budget.Met, false},
		{"at the limit", bounded, map[string]float64{"x": 2}, budget.Met, false},
		{"over the limit", bounded, map[string]float64{"x": 2.0001}, budget.Missed, false},
		{"not measured", bounded, map[string]float64{"y": 1}, budget.NotMeasured, false},
		{"under the least", between, map[string]float64{"x": 0.89}, budget.Missed, false},
		{"between least and limit", between, map[string]float64{"x": 1}, budget.Met, false},
		{"at the only least", atLeast, map[string]float64{"x": 4}, budget.Met, false},
		{"far over the only least", atLeast, map[string]float64{"x": 4000}, budget.Met, false},
		{"under the only least", atLeast, map[string]float64{"x": 3.99}, budget.Missed, false},
		{"none allowed, none", none, map[string]float64{"x": 0}, budget.Met, false},
		{"none allowed, one", none, map[string]float64{"x": 1}, budget.Missed, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := budget.Judge([]budget.Budget{test.budget}, test.values)
			require.Len(t, got, 1)
			require.Equal(t, test.want, got[0].Outcome)
			require.Equal(t, test.aim, got[0].AimMet)
			if test.want == budget.NotMeasured {
				require.Nil(t, got[0].Measured)
			} else {
				require.InDelta(t, test.values["x"], *got[0].Measured, 0)
			}
			if err := budget.Check(got); test.want == budget.Met {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, "x ("+string(test.want)+")")
			}
		})
	}
}

// bounds are the budgets' bounds by their keys: a limit, or the least value as a negative number.
func bounds(t *testing.T, suites ...[]budget.Budget) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for _, suite := range suites {
		for _, b := range suite {
			require.NotContains(t, out, b.Key)
			require.NotEmpty(t, b.What)
			out[b.Key] = b.Limit
			if b.AtLeast {
				out[b.Key] = -b.Least
			}
		}
	}
	return out
}

// The budgets are those of the issues: a change of one is a change of what was promised.
func TestBudgets(t *testing.T) {
	require.Equal(t, map[string]float64{
		"ns_per_op_1000": 2000, "growth_100_to_100000": 3, "allocs_per_op_max": 0, "cached_call_ns": 50_000, "cpu_cores": 1, "rss_mib": 700, "create_p99_ms": 100, "start_s": 10, "takeover_s": 2,
		"api_requests_per_container": 0,
		"ours_over_default_tree":     0.2, "ours_over_default_pairs": 0.2, "ours_over_lifted_tree": 1, "ours_over_lifted_pairs": 1,
		"ours_over_builtin_bytes_per_node": 1, "ours_over_builtin_heap_per_node": 1,
	}, bounds(t, budget.Registry(), budget.Scale(), budget.Janitor(), budget.GC()))
}

// Handler fsb has the budgets of issue 14, any other one those of issue 4.
func TestBudgetsOfHandlers(t *testing.T) {
	of := func(handler string) map[string]float64 {
		return bounds(t, budget.Create(handler), budget.Burst(handler), budget.Density(handler), budget.Rate(handler))
	}
	for _, handler := range []string{"runc", "crun", ""} {
		require.Equal(t, map[string]float64{
			"slot_over_raw_p50": 0.15, "slot_over_raw_p99": 0.40, "cold_over_raw": 1.20, "strong_over_pod": 0.25,
			"slot_stages_over_client": 1.10, "cold_stages_over_client": 1.10, "all_p99_over_raw_p50": 2, "free_slot_mib": 2,
		}, of(handler), handler)
	}
	require.Equal(t, map[string]float64{
		"slot_over_raw_p50": 0.10, "slot_over_raw_p99": 0.25, "cold_over_raw_p50": 0.25, "users_on_over_off_p50": 1.05, "strong_over_pod": 0.25,
		"slot_stages_over_client": 1.10, "cold_stages_over_client": 1.10, "all_p99_over_raw_p50": 2, "none_p99_over_raw_p50": 6,
		"refill_per_s": -100, "rate_over_raw": -4, "cpu_over_raw": 0.35, "free_slot_mib": 1.5, "claimed_mib": 2,
	}, of(budget.Own))
}
