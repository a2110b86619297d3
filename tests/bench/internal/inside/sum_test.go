package inside_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/inside"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestSum(t *testing.T) {
	r := &report.Report{Suite: "exec", Began: time.Unix(0, 0)}
	for series, value := range map[string]float64{inside.RawExec: 40, inside.Run: 2, inside.RunAgent: 1.5, inside.RawCreate: 60, inside.FirstOutput: 9} {
		for i := range 10 {
			r.Sample(series, i, r.Began, value, "ms", "")
		}
	}
	r.Value("write_mib_per_second", 300, "MiB/s", "")
	r.Value("up_mib_per_second", 600, "MiB/s", "")
	inside.Sum(r)
	r.Judge(budget.Inside())
	for key, want := range map[string]float64{
		"run_over_exec_p50": 0.05, "run_over_exec_p99": 0.05, "run_agent_ms": 1.5, "first_output_over_raw_p50": 0.15, "write_over_stream": 0.5,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	_, measured := r.Number("terminal_echo_ms")
	require.False(t, measured)
	outcomes := map[string]budget.Outcome{}
	for _, v := range r.Budgets {
		outcomes[v.Key] = v.Outcome
	}
	require.Equal(t, budget.Met, outcomes["run_over_exec_p50"])
	require.Equal(t, budget.NotMeasured, outcomes["terminal_echo_ms"])
}
