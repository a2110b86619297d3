// Package gobench runs the Go benchmarks of what every fast create passes in the allocator's memory, the Registry's Allocate and the
// checks of its caller, and reads their output with benchfmt.
package gobench

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"math"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/perf/benchfmt"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// benchmark is a Go benchmark with sub-benchmarks that are named by one parameter, as in BenchmarkAllocate/agents=1000-2.
type benchmark struct{ target, name, parameter string }

func allocate() benchmark {
	return benchmark{"./services/allocator/internal/registry", "BenchmarkAllocate", "agents"}
}

func cachedCall() benchmark { return benchmark{"./internal/rpc", "BenchmarkCachedCall", "caller"} }

// Options set the number of runs.
type Options struct {
	Count int
	Time  string
	Say   func(format string, args ...any)
}

// Result is the median of the runs at one number of agents.
type Result struct {
	NanosPerOp  float64 `json:"ns_per_op"`
	AllocsPerOp float64 `json:"allocs_per_op"`
	BytesPerOp  float64 `json:"bytes_per_op"`
	Runs        int     `json:"runs"`
}

// Run measures and fills the report. It needs the sources and a Go toolchain, and no cluster.
func Run(ctx context.Context, o Options, r *report.Report) error {
	var commands []string
	measured := map[benchmark]Runs{}
	for _, b := range []benchmark{allocate(), cachedCall()} {
		o.Say("running %s in %s", b.name, b.target)
		cmd := exec.CommandContext(ctx, "go", "test", "-run", "-", "-bench", "^"+b.name+"$", "-benchmem",
			"-count", strconv.Itoa(o.Count), "-benchtime", o.Time, "-timeout", "30m", b.target)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		out, err := cmd.Output()
		if err != nil {
			return fmt.Errorf("running %s: %w\n%s%s", b.name, err, out, stderr.String())
		}
		if measured[b], err = b.parse(string(out)); err != nil {
			return err
		}
		commands = append(commands, strings.Join(cmd.Args, " "))
	}
	r.Fact("commands", commands)
	r.Fact("samples", fmt.Sprintf("%d runs of %s each; the median counts", o.Count, o.Time))
	r.Fact("concurrency", 1)
	r.Fact("cache", "warm: one Registry allocates one agent after the other; what the API server says of the caller is remembered")
	if err := Allocations(r, measured[allocate()]); err != nil {
		return err
	}
	Calls(r, measured[cachedCall()])
	r.Judge(budget.Registry())
	return nil
}

// measurement is one run of a benchmark.
type measurement struct{ nanos, bytes, allocs float64 }

// Runs are all runs of a benchmark by its parameter.
type Runs map[string][]measurement

// ParseAllocations reads the output of the benchmark of Allocate, by the number of agents.
func ParseAllocations(out string) (Runs, error) { return allocate().parse(out) }

// ParseCalls reads the output of the benchmark of calls, by their caller.
func ParseCalls(out string) (Runs, error) { return cachedCall().parse(out) }

// parse reads the output of go test.
func (b benchmark) parse(out string) (Runs, error) {
	runs := Runs{}
	for results := benchfmt.NewReader(strings.NewReader(out), "go test"); results.Scan(); {
		switch record := results.Result().(type) {
		case *benchfmt.SyntaxError:
			return nil, fmt.Errorf("reading the output of go test: %w", record)
		case *benchfmt.Result:
			parameter, m, err := b.read(record)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", record.Name, err)
			}
			if m != nil {
				runs[parameter] = append(runs[parameter], *m)
			}
		}
	}
	if len(runs) == 0 {
		return nil, fmt.Errorf("the output of go test has no result of %s:\n%s", b.name, out)
	}
	return runs, nil
}

// read reads one result; nil for that of another benchmark.
func (b benchmark) read(record *benchfmt.Result) (parameter string, m *measurement, err error) {
	base, parts := record.Name.Parts()
	if "Benchmark"+string(base) != b.name || len(parts) == 0 {
		return "", nil, nil
	}
	parameter = strings.TrimPrefix(string(parts[0][1:]), b.parameter+"=")
	m = &measurement{}
	for unit, value := range map[string]*float64{"sec/op": &m.nanos, "B/op": &m.bytes, "allocs/op": &m.allocs} {
		var ok bool
		if *value, ok = record.Value(unit); !ok {
			return "", nil, fmt.Errorf("it has no %s", unit)
		}
	}
	m.nanos = math.Round(m.nanos*1e12) / 1e3 // benchfmt converts nanoseconds to seconds; go test prints them to a thousandth at most
	return parameter, m, nil
}

// result adds the samples of runs to the report, and returns their medians and the most allocations.
func result(r *report.Report, series string, runs []measurement) Result {
	var times, sizes, counts []float64
	for i, x := range runs {
		times, sizes, counts = append(times, x.nanos), append(sizes, x.bytes), append(counts, x.allocs)
		r.Sample(series, i, r.Began, x.nanos, "ns/op", "")
	}
	return Result{stat.Quantile(times, 0.5), slices.Max(counts), stat.Quantile(sizes, 0.5), len(times)}
}

// Allocations adds the runs of Allocate to the report.
func Allocations(r *report.Report, runs Runs) error {
	table := report.Table{Key: "rows", Title: "One Allocate on the success path, with images and ports", Columns: []string{"agents", "runs", "ns_per_op", "bytes_per_op", "allocs_per_op"}}
	line := report.Line{Name: "Allocate"}
	byAgents, names := map[int]Result{}, map[string]Result{}
	for name := range runs {
		n, err := strconv.Atoi(name)
		if err != nil {
			return fmt.Errorf("reading the number of agents: %w", err)
		}
		byAgents[n] = Result{}
	}
	allocs := 0.0
	for _, n := range slices.Sorted(maps.Keys(byAgents)) {
		name := strconv.Itoa(n)
		x := result(r, name, runs[name])
		byAgents[n], names[name] = x, x
		table.Rows = append(table.Rows, []any{n, x.Runs, x.NanosPerOp, x.BytesPerOp, x.AllocsPerOp})
		line.Points = append(line.Points, [2]float64{float64(n), x.NanosPerOp})
		allocs = max(allocs, x.AllocsPerOp)
	}
	if x, ok := byAgents[1000]; ok {
		r.Value("ns_per_op_1000", x.NanosPerOp, "ns", "one Allocate at 1,000 agents")
	}
	if few, many := byAgents[100].NanosPerOp, byAgents[100_000].NanosPerOp; few > 0 && many > 0 {
		r.Value("growth_100_to_100000", many/few, "", "Allocate at 100,000 agents over 100 agents")
	}
	r.Value("allocs_per_op_max", allocs, "", "allocations of one Allocate, the most at any number of agents")
	r.Extra = map[string]any{"agents": names}
	r.Tables = append(r.Tables, table)
	r.Figure = report.Figure{Title: "One Allocate", X: "agents", Y: "nanoseconds", LogX: true, LogY: true, Lines: []report.Line{line}}
	return nil
}

// Calls adds the runs of calls to the report.
func Calls(r *report.Report, runs Runs) {
	table := report.Table{Key: "calls", Title: "A call through all interceptors of a server, without its transport and its handler", Columns: []string{"caller", "runs", "ns_per_op", "bytes_per_op", "allocs_per_op"}}
	for _, caller := range slices.Sorted(maps.Keys(runs)) {
		x := result(r, caller, runs[caller])
		table.Rows = append(table.Rows, []any{caller, x.Runs, x.NanosPerOp, x.BytesPerOp, x.AllocsPerOp})
		if caller == "token" {
			r.Value("cached_call_ns", x.NanosPerOp, "ns", "a call of a user with a token through all interceptors, with the decision remembered")
		}
	}
	r.Tables = append(r.Tables, table)
}
