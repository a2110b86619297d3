package gobench_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/gobench"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const output = `goos: linux
goarch: amd64
pkg: github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry
BenchmarkAllocate/agents=100-2         	 2000000	       600.0 ns/op	       0 B/op	       0 allocs/op
BenchmarkAllocate/agents=100-2         	 2000000	       500.0 ns/op	       0 B/op	       0 allocs/op
BenchmarkAllocate/agents=100-2         	 2000000	       900.0 ns/op	       0 B/op	       0 allocs/op
BenchmarkAllocate/agents=1000-2        	 1000000	       800.5 ns/op	       0 B/op	       0 allocs/op
BenchmarkAllocate/agents=100000        	  500000	      1200 ns/op	       8 B/op	       1 allocs/op
BenchmarkCachedCall/caller=token-2     	   50000	     20000 ns/op	    6000 B/op	      90 allocs/op
BenchmarkCachedCall/caller=token-2     	   50000	     60000 ns/op	    6000 B/op	      90 allocs/op
BenchmarkCachedCall/caller=token-2     	   50000	     50001 ns/op	    6000 B/op	      90 allocs/op
BenchmarkCachedCall/caller=component-2 	   90000	     10000 ns/op	    3000 B/op	      50 allocs/op
PASS
ok  	github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry	9.1s
`

func TestParseAndSum(t *testing.T) {
	runs, err := gobench.ParseAllocations(output)
	require.NoError(t, err)
	calls, err := gobench.ParseCalls(output)
	require.NoError(t, err)
	r := &report.Report{}
	require.NoError(t, gobench.Allocations(r, runs))
	gobench.Calls(r, calls)
	require.Equal(t, map[string]gobench.Result{
		"100":    {NanosPerOp: 600, Runs: 3},
		"1000":   {NanosPerOp: 800.5, Runs: 1},
		"100000": {NanosPerOp: 1200, AllocsPerOp: 1, BytesPerOp: 8, Runs: 1},
	}, r.Extra["agents"])
	r.Judge(budget.Registry())
	outcomes := map[string]budget.Outcome{}
	for _, v := range r.Budgets {
		outcomes[v.Key] = v.Outcome
	}
	require.Equal(t, map[string]budget.Outcome{"ns_per_op_1000": budget.Met, "growth_100_to_100000": budget.Met, "allocs_per_op_max": budget.Missed, "cached_call_ns": budget.Missed}, outcomes)
	require.Len(t, r.Samples, 9)
	x, ok := r.Number("cached_call_ns")
	require.True(t, ok)
	require.InDelta(t, 50_001, x, 0)
}

// What was not run is not measured, and no zero.
func TestSumOfSome(t *testing.T) {
	runs, err := gobench.ParseAllocations("BenchmarkAllocate/1000-2 \t 10 \t 700 ns/op \t 0 B/op \t 0 allocs/op\n")
	require.NoError(t, err)
	r := &report.Report{}
	require.NoError(t, gobench.Allocations(r, runs))
	_, ok := r.Number("growth_100_to_100000")
	require.False(t, ok)
	x, ok := r.Number("ns_per_op_1000")
	require.True(t, ok)
	require.InDelta(t, 700, x, 0)
}

func TestParseRefuses(t *testing.T) {
	for _, bad := range []string{"", "PASS\n", "BenchmarkOther/agents=1-2 10 5 ns/op\n", "BenchmarkAllocate/agents=1-2 10 5 ns/op\n", "BenchmarkAllocate/agents=1-2 10 five ns/op 0 B/op 0 allocs/op\n",
		"BenchmarkAllocate/agents=many-2 10 5 ns/op 0 B/op 0 allocs/op\n"} {
		runs, err := gobench.ParseAllocations(bad)
		if err == nil {
			err = gobench.Allocations(&report.Report{}, runs)
		}
		require.Error(t, err, bad)
	}
}
