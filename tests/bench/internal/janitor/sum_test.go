package janitor_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/janitor"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func calls(walls ...float64) []janitor.Call {
	var out []janitor.Call
	for _, w := range walls {
		out = append(out, janitor.Call{At: time.Unix(1000, 0), Wall: w, CPU: w / 2})
	}
	return out
}

// size is one where a scan takes factor x 10 ms, and factor x 4 ms of the janitor's CPU.
func size(containers int, factor float64) *janitor.Size {
	return &janitor.Size{
		Containers: containers,
		Idle:       &janitor.Window{Seconds: 10, CPU: janitor.CPU{Janitor: 0.02, Containerd: 0.1}},
		Busy: &janitor.Window{
			Seconds: 5, Count: 4, CPU: janitor.CPU{Janitor: 0.01 + 0.016*factor, Containerd: 0.03, Shims: 0.02}, Scans: calls(9*factor, 10*factor, 30*factor),
			Calls: map[string]int{"List Tasks": 8, "ListStream Containers": 4}, RSS: 60, Shims: 5,
		},
		Lists: calls(1, 2, 3), Tasks: calls(4, 5, 6),
	}
}

func TestSum(t *testing.T) {
	r := &report.Report{Suite: "janitor", Began: time.Unix(1000, 0)}
	janitor.Sum(r, &janitor.Measured{Sizes: []*janitor.Size{size(100, 1), size(1000, 8)}})
	for key, want := range map[string]float64{
		"containers": 1000, "scans": 4, "wall_ms_p50": 80, "wall_ms_p90": 240, "scan_over_list": 40, "cpu_ms_per_scan": 32, "cpu_us_per_container": 32,
		"containerd_cpu_ms_per_scan": 0, "shims_cpu_ms_per_scan": 5, "containerd_calls_per_scan": 3, "api_requests_per_container": 0, "rss_mib": 60,
		"idle_cpu_cores": 0.002, "list_ms_p50": 2, "list_cpu_ms": 1, "tasks_ms_p50": 5, "containers_growth": 10, "wall_growth": 8, "cpu_growth": 8,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	require.Contains(t, r.Conditions, report.Fact{Key: "containerd_calls", Value: "List Tasks 2.00, ListStream Containers 1.00"})
	require.Len(t, r.Tables[0].Rows, 2)
	for _, row := range r.Tables[0].Rows {
		require.Len(t, row, len(r.Tables[0].Columns))
	}
	require.Equal(t, []float64{9, 10, 30}, r.Of("scan-100"))
	require.Len(t, r.Figure.Lines, 6)
	r.Judge(budget.Janitor())
	require.NoError(t, budget.Check(r.Budgets))
}

// One request in all is too many already.
func TestARequestMissesTheBudget(t *testing.T) {
	r, s := &report.Report{}, size(1000, 1)
	s.Busy.Requests = 1
	janitor.Sum(r, &janitor.Measured{Sizes: []*janitor.Size{s}})
	got, ok := r.Number("api_requests_per_container")
	require.True(t, ok)
	require.InDelta(t, 1.0/4000, got, 1e-12)
	_, ok = r.Number("cpu_growth")
	require.False(t, ok, "of one number of containers nothing grows")
	r.Judge(budget.Janitor())
	require.ErrorContains(t, budget.Check(r.Budgets), "api_requests_per_container (missed)")
}

// Without a scan there is no time of one, rather than one of zero, and the budget is not met.
func TestSumWithoutScans(t *testing.T) {
	r, s := &report.Report{}, size(1000, 1)
	s.Busy.Count, s.Busy.Scans = 0, nil
	janitor.Sum(r, &janitor.Measured{Sizes: []*janitor.Size{s}})
	for _, key := range []string{"wall_ms_p50", "cpu_ms_per_scan", "api_requests_per_container"} {
		_, ok := r.Number(key)
		require.False(t, ok, key)
	}
	r.Judge(budget.Janitor())
	require.Error(t, budget.Check(r.Budgets))
}

func TestRequestsInTheWindow(t *testing.T) {
	began := time.Unix(1000, 0)
	w := &janitor.Window{Began: began, Seconds: 10}
	all, err := janitor.ParseRequests([]byte(
		line("a", "list", "bench-janitor", began.Add(-time.Second)) + line("b", "get", "bench-janitor", began.Add(time.Second)) +
			line("b", "get", "bench-janitor", began.Add(time.Second)) + line("c", "get", "another-user", began.Add(time.Second)) +
			line("d", "watch", "bench-janitor", began.Add(9*time.Second)) + line("e", "get", "bench-janitor", began.Add(11*time.Second))))
	require.NoError(t, err)
	require.Len(t, all, 4, "each once, and only the janitor's")
	w.Asked(all)
	require.Equal(t, 1, w.Requests)
	require.Equal(t, 1, w.Watches)
	_, err = janitor.ParseRequests([]byte("no JSON\n"))
	require.Error(t, err)
}

func line(id, verb, user string, at time.Time) string {
	return `{"auditID":"` + id + `","verb":"` + verb + `","requestURI":"/","user":{"username":"` + user + `"},"requestReceivedTimestamp":"` + at.UTC().Format(time.RFC3339Nano) + `"}` + "\n"
}

func TestParseMetrics(t *testing.T) {
	got, err := janitor.ParseMetrics("# HELP x y\n\nx_count 3\nx{a=\"b c\",d=\"e\"} 1.5e3\nx{a=\"f\"} 2\nxy 7\n")
	require.NoError(t, err)
	require.Equal(t, janitor.Readings{"x_count": 3, `x{a="b c",d="e"}`: 1500, `x{a="f"}`: 2, "xy": 7}, got)
	require.InDelta(t, 1502, got.Sum("x"), 0)
	require.Equal(t, "b c", janitor.Label(`x{a="b c",d="e"}`, "a"))
	require.Empty(t, janitor.Label("xy", "a"))
	for _, bad := range []string{"x\n", "x y\n"} {
		_, err := janitor.ParseMetrics(bad)
		require.Error(t, err, bad)
	}
}

// A janitor that judges one thing otherwise, or one more, is not measured.
func TestJudged(t *testing.T) {
	kept := janitor.Readings{`fastsandbox_janitor_verdicts{action="keep",reason="assigned"}`: 3, `fastsandbox_janitor_verdicts{action="delete",reason="agent-gone"}`: 0}
	require.NoError(t, kept.Judged(3))
	require.Error(t, kept.Judged(2))
	kept[`fastsandbox_janitor_verdicts{action="delete",reason="agent-gone"}`] = 1
	require.Error(t, kept.Judged(3))
}

func TestRunRefuses(t *testing.T) {
	for _, o := range []janitor.Options{
		{Containers: 0, Scans: 1, Interval: 1}, {Containers: 1, Fewer: 1, Scans: 1, Interval: 1}, {Containers: 1, Interval: 1}, {Containers: 1, Scans: 1},
	} {
		require.ErrorContains(t, janitor.Run(t.Context(), o, &report.Report{}), "cannot measure")
	}
}
