package scale_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/scale"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSum(t *testing.T) {
	began := time.Unix(1000, 0)
	r := &report.Report{Began: began}
	scale.Sum(r, &scale.Measured{
		Start: 3 * time.Second, Lists: 4 * time.Second, Takeover: 1500 * time.Millisecond,
		Idle: scale.Usage{Cores: 0.1},
		Busy: scale.Usage{Cores: 0.5, RSS: 700, StandbyCores: 0.2, StandbyRSS: 600, Points: []scale.UsagePoint{
			{At: began.Add(time.Second), Cores: 0.4, RSS: 650}, {At: began.Add(2 * time.Second), Cores: 0.6, RSS: 700},
		}},
		Creates: []scale.Timed{{At: began, Took: 2 * time.Millisecond}, {At: began, Took: 9 * time.Millisecond}, {At: began, Took: 3 * time.Millisecond}},
		Errors:  []string{"it broke"},
	})
	for key, want := range map[string]float64{
		"cpu_cores": 0.5, "rss_mib": 700, "idle_cpu_cores": 0.1, "create_p50_ms": 3, "create_p99_ms": 9, "takeover_s": 1.5, "start_s": 3, "lists_s": 4,
		"standby_cpu_cores": 0.2, "standby_rss_mib": 600, "errors": 1,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	require.Equal(t, [][2]float64{{1, 0.4}, {2, 0.6}}, r.Figure.Lines[0].Points)
	require.Contains(t, r.Conditions, report.Fact{Key: "first_error", Value: "it broke"})
	r.Judge(budget.Scale())
	require.NoError(t, budget.Check(r.Budgets))
}

// Without an answer there is no latency, rather than one of zero.
func TestSumWithoutCreates(t *testing.T) {
	r := &report.Report{}
	scale.Sum(r, &scale.Measured{})
	_, ok := r.Number("create_p99_ms")
	require.False(t, ok)
}
