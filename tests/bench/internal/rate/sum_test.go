package rate_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/rate"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

const limit = 250 * time.Millisecond

func measured() rate.Measured {
	good := rate.Trial{
		Schedule: rate.Schedule{Rate: 2, Duration: 2 * time.Second}, Millis: []float64{10, 20, 30, 40}, Paths: map[string]int{"slot": 3, "cold": 1},
		Drain: time.Second,
	}
	bad := rate.Trial{Schedule: rate.Schedule{Rate: 4, Duration: time.Second}, Millis: []float64{10}, Failed: 1, Error: "full", Skipped: 2}
	return rate.Measured{
		Rate: 2, Confirmed: good, Trials: []rate.Trial{bad, good},
		// 4 creates took 4 s; in that time an idle cluster uses 0.5 s of containerd.
		Used: rate.Usage{Wall: 4 * time.Second, Parts: map[string]float64{
			rate.Containerd: 0.65, rate.Agents: 0.1, rate.Etcd: 0.04, rate.APIServer: 0.08, rate.Kubernetes: 7, rate.Client: 9,
		}},
		// 10 raw containers took 20 s; in that time an idle cluster uses 2.5 s of containerd.
		Raw: rate.Reference{
			Millis: []float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10},
			Used:   rate.Usage{Wall: 20 * time.Second, Parts: map[string]float64{rate.Containerd: 3.5, rate.Shims: 1, rate.Kubernetes: 5}},
		},
		Idle: rate.Usage{Wall: 10 * time.Second, Parts: map[string]float64{rate.Containerd: 1.25}},
	}
}

func TestSum(t *testing.T) {
	r := &report.Report{}
	rate.Sum(r, measured(), limit)
	for key, want := range map[string]float64{
		"raw_per_s": 0.5, "raw_p50_ms": 5, "rate_per_s": 2, "rate_over_raw": 4, "p50_ms": 20, "p99_ms": 40, "by_slot": 0.75, "drain_s": 1,
		"cpu_ms": 62.5, "raw_cpu_ms": 200, "cpu_over_raw": 0.3125, "etcd_cpu_ms": 10, "apiserver_cpu_ms": 20,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	require.Equal(t, "trials", r.Tables[0].Key)
	require.Len(t, r.Tables[0].Rows, 2)
	require.Equal(t, []any{false, "1 calls failed: full"}, r.Tables[0].Rows[0][11:])
	require.Equal(t, []any{true, ""}, r.Tables[0].Rows[1][11:])
	require.Equal(t, "cpu", r.Tables[1].Key)
	row := r.Tables[1].Rows[3]
	require.Equal(t, []any{rate.Containerd, true}, row[:2])
	require.InDeltaSlice(t, []float64{37.5, 100, 0.125}, []float64{row[2].(float64), row[3].(float64), row[4].(float64)}, 1e-9)
	require.Equal(t, [][2]float64{{2, 40}, {4, 10}}, r.Figure.Lines[0].Points, "by their rates")
	r.Judge(budget.Rate(budget.Own))
	require.NoError(t, budget.Check(r.Budgets))
}

// Where no rate held there is no ratio, which would be a zero that keeps the budget of CPU time.
func TestSumWithoutARate(t *testing.T) {
	m := measured()
	m.Rate = 0
	r := &report.Report{}
	rate.Sum(r, m, limit)
	for _, key := range []string{"rate_per_s", "rate_over_raw", "cpu_over_raw", "p99_ms"} {
		_, ok := r.Number(key)
		require.False(t, ok, key)
	}
	_, ok := r.Number("raw_per_s")
	require.True(t, ok)
	r.Judge(budget.Rate(budget.Own))
	require.ErrorContains(t, budget.Check(r.Budgets), "cpu_over_raw (not measured)")

	m = measured()
	m.Idle = rate.Usage{}
	r = &report.Report{}
	rate.Sum(r, m, limit)
	_, ok = r.Number("cpu_over_raw")
	require.False(t, ok, "without the CPU time of nothing")
}

func TestUsage(t *testing.T) {
	a := rate.Usage{Wall: time.Second, Parts: map[string]float64{rate.Etcd: 1, rate.Agents: 2}}
	b := a.Add(rate.Usage{Wall: 2 * time.Second, Parts: map[string]float64{rate.Etcd: 3, rate.Shims: 4}})
	require.Equal(t, rate.Usage{Wall: 3 * time.Second, Parts: map[string]float64{rate.Etcd: 4, rate.Agents: 2, rate.Shims: 4}}, b)
	require.Equal(t, map[string]float64{rate.Etcd: 1, rate.Agents: 2}, a.Parts, "unchanged")
	require.Empty(t, b.Each(0, a))
	require.Equal(t, map[string]float64{rate.Etcd: 500, rate.Agents: -2000, rate.Shims: 2000}, b.Each(2, a))
}
