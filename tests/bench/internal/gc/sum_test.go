package gc_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/gc"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// every is times at a fixed distance.
func every(d time.Duration, n int) (out []time.Duration) {
	for i := range n {
		out = append(out, time.Duration(i+1)*d)
	}
	return out
}

func whole(n int, d time.Duration) *gc.Cascade {
	return &gc.Cascade{Objects: n, Deleted: every(d/time.Duration(n), n), Watched: d, CPU: 2, Requests: float64(n)}
}

func measured(candidate string, round int, tree, pairs *gc.Cascade, rss, heap int64) gc.Measured {
	return gc.Measured{Candidate: candidate, Round: round, Nodes: 100, Tree: tree, Pairs: pairs,
		Empty: gc.Memory{RSS: 1 << 20, Heap: 1000}, Full: gc.Memory{RSS: 1<<20 + 100*rss, Heap: 1000 + 100*heap}}
}

func TestTotal(t *testing.T) {
	for name, test := range map[string]struct {
		cascade  gc.Cascade
		want     float64
		fraction float64
	}{
		"to the end":              {*whole(100, 4*time.Second), 4, 1},
		"half of it":              {gc.Cascade{Objects: 20, Deleted: every(time.Second, 10), Watched: 10 * time.Second}, 20, 0.5},
		"a burst does not count":  {gc.Cascade{Objects: 100, Deleted: append(make([]time.Duration, 30), every(time.Second, 20)...), Watched: 20 * time.Second}, 70, 0.5},
		"nothing":                 {gc.Cascade{Objects: 100, Watched: time.Minute}, 0, 0},
		"no more after its start": {gc.Cascade{Objects: 10, Deleted: every(time.Second, 4), Watched: time.Minute}, 0, 0.4},
	} {
		t.Run(name, func(t *testing.T) {
			require.InDelta(t, test.want, test.cascade.Total(), 1e-9)
			require.InDelta(t, test.fraction, test.cascade.Fraction(), 1e-9)
		})
	}
}

func TestSum(t *testing.T) {
	bounded := &gc.Cascade{Objects: 100, Deleted: every(time.Second, 50), Watched: 50 * time.Second, CPU: 3, Requests: 100}
	r := &report.Report{}
	gc.Sum(r, []gc.Measured{
		measured(gc.Ours, 0, whole(100, 2*time.Second), whole(10, time.Second), 500, 100),
		measured(gc.Default, 0, bounded, whole(10, 20*time.Second), 1000, 400),
		measured(gc.Lifted, 0, whole(100, 3*time.Second), whole(10, 2*time.Second), 2000, 200),
		// Medians by nearest rank: of two, the lesser one.
		measured(gc.Ours, 1, whole(100, 9*time.Second), whole(10, 9*time.Second), 900, 900),
	})
	for key, want := range map[string]float64{
		"ours_tree_s": 2, "default_tree_s": 100, "lifted_tree_s": 3, "ours_pairs_s": 1, "default_pairs_s": 20, "lifted_pairs_s": 2,
		"ours_tree_cpu_s": 2, "default_tree_cpu_s": 6, "ours_requests_per_object": 1, "default_requests_per_object": 2,
		"ours_bytes_per_node": 500, "lifted_bytes_per_node": 2000, "ours_heap_bytes_per_node": 100, "lifted_heap_bytes_per_node": 200,
		"default_measured_fraction": 0.5,
		"default_over_ours_tree":    50, "lifted_over_ours_tree": 1.5, "default_over_ours_pairs": 20, "lifted_over_ours_pairs": 2,
		"ours_over_default_tree": 0.02, "ours_over_lifted_tree": 2.0 / 3, "ours_over_default_pairs": 0.05, "ours_over_lifted_pairs": 0.5,
		"ours_over_builtin_bytes_per_node": 0.5, "ours_over_builtin_heap_per_node": 0.5,
	} {
		got, ok := r.Number(key)
		require.True(t, ok, key)
		require.InDelta(t, want, got, 1e-9, key)
	}
	r.Judge(budget.GC())
	require.NoError(t, budget.Check(r.Budgets))
	require.Len(t, r.Figure.Lines, 3)
	require.Equal(t, [2]float64{2, 100}, r.Figure.Lines[0].Points[99])
}

// What did not move at all while it was watched is not measured, rather than infinitely fast.
func TestSumWithoutProgress(t *testing.T) {
	r := &report.Report{}
	gc.Sum(r, []gc.Measured{
		measured(gc.Ours, 0, whole(100, time.Second), whole(10, time.Second), 1, 1),
		measured(gc.Default, 0, &gc.Cascade{Objects: 100, Watched: time.Minute}, whole(10, time.Second), 1, 1),
		measured(gc.Lifted, 0, whole(100, time.Second), whole(10, time.Second), 1, 1),
	})
	_, ok := r.Number("default_tree_s")
	require.False(t, ok)
	r.Judge(budget.GC())
	require.ErrorContains(t, budget.Check(r.Budgets), "ours_over_default_tree (not measured)")
}

// A tree with as many dependents as are asked for has the depth that is said, and not less for many.
func TestFanout(t *testing.T) {
	require.Equal(t, 22, gc.Fanout(10_000, 3)) // 22 + 484 + 10,648
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 20_000).Draw(t, "n")
		f, deepest := gc.Fanout(n, 3), 0
		for i := n; i > 0; i = (i - 1) / f {
			deepest++
		}
		require.LessOrEqual(t, deepest, 3)
		if f > 1 {
			require.Greater(t, n, (f-1)+(f-1)*(f-1)+(f-1)*(f-1)*(f-1), "a smaller one would not do")
		}
	})
}

func TestParseRequests(t *testing.T) {
	got, err := gc.ParseRequests(`# TYPE apiserver_request_total counter
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="configmaps",scope="resource",subresource="",verb="DELETE",version="v1"} 12
apiserver_request_total{code="404",component="apiserver",dry_run="",group="",resource="configmaps",scope="resource",subresource="",verb="DELETE",version="v1"} 1.5e+01
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="configmaps",scope="resource",subresource="",verb="GET",version="v1"} 3
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="configmaps",scope="namespace",subresource="",verb="LIST",version="v1"} 4
apiserver_request_total{code="200",component="apiserver",dry_run="",group="",resource="pods",scope="resource",subresource="",verb="GET",version="v1"} 5
apiserver_request_duration_seconds_count{resource="configmaps",verb="GET"} 6
`)
	require.NoError(t, err)
	require.Equal(t, map[string]float64{"DELETE": 27, "GET": 3}, got)
	for _, bad := range []string{`apiserver_request_total{resource="configmaps",verb="GET"}`, `apiserver_request_total{resource="configmaps",verb="GET"} many`} {
		_, err := gc.ParseRequests(bad)
		require.Error(t, err, bad)
	}
}

func TestParseHeap(t *testing.T) {
	got, err := gc.ParseHeap(strings.NewReader("heap profile: 1: 2 [3: 4] @ heap/1048576\n\n# runtime.MemStats\n# Alloc = 5\n# HeapAlloc = 4242\n# HeapSys = 7\n"))
	require.NoError(t, err)
	require.EqualValues(t, 4242, got)
	for _, bad := range []string{"", "# HeapAlloc = much\n"} {
		_, err := gc.ParseHeap(strings.NewReader(bad))
		require.Error(t, err, bad)
	}
}
