// Package gobench runs the Go benchmark of the Registry's Allocate and reads its output with benchfmt.
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

const (
	target    = "./services/allocator/internal/registry"
	benchmark = "BenchmarkAllocate"
)

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
	o.Say("running %s in %s", benchmark, target)
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "go", "test", "-run", "-", "-bench", "^"+benchmark+"$", "-benchmem",
		"-count", strconv.Itoa(o.Count), "-benchtime", o.Time, "-timeout", "30m", target)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("running %s: %w\n%s%s", benchmark, err, out, stderr.String())
	}
	runs, err := Parse(string(out))
	if err != nil {
		return err
	}
	r.Fact("command", strings.Join(cmd.Args, " "))
	r.Fact("samples", fmt.Sprintf("%d runs of %s each; the median counts", o.Count, o.Time))
	r.Fact("concurrency", 1)
	r.Fact("cache", "warm: one Registry allocates one agent after the other")
	Sum(r, runs)
	r.Judge(budget.Registry())
	return nil
}

// measurement is one run of the benchmark.
type measurement struct{ nanos, bytes, allocs float64 }

// Runs are all runs by the number of agents.
type Runs map[int][]measurement

// Parse reads the output of go test, whose benchmark is named by the number of agents: BenchmarkAllocate/agents=1000-2.
func Parse(out string) (Runs, error) {
	runs := Runs{}
	for results := benchfmt.NewReader(strings.NewReader(out), "go test"); results.Scan(); {
		switch record := results.Result().(type) {
		case *benchfmt.SyntaxError:
			return nil, fmt.Errorf("reading the output of go test: %w", record)
		case *benchfmt.Result:
			agents, m, err := read(record)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", record.Name, err)
			}
			if m != nil {
				runs[agents] = append(runs[agents], *m)
			}
		}
	}
	if len(runs) == 0 {
		return nil, fmt.Errorf("the output of go test has no result of %s:\n%s", benchmark, out)
	}
	return runs, nil
}

// read reads one result; nil for that of another benchmark.
func read(record *benchfmt.Result) (agents int, m *measurement, err error) {
	base, parts := record.Name.Parts()
	if "Benchmark"+string(base) != benchmark || len(parts) == 0 {
		return 0, nil, nil
	}
	if agents, err = strconv.Atoi(strings.TrimPrefix(string(parts[0][1:]), "agents=")); err != nil {
		return 0, nil, fmt.Errorf("reading the number of agents: %w", err)
	}
	m = &measurement{}
	for unit, value := range map[string]*float64{"sec/op": &m.nanos, "B/op": &m.bytes, "allocs/op": &m.allocs} {
		var ok bool
		if *value, ok = record.Value(unit); !ok {
			return 0, nil, fmt.Errorf("it has no %s", unit)
		}
	}
	m.nanos = math.Round(m.nanos*1e12) / 1e3 // benchfmt converts nanoseconds to seconds; go test prints them to a thousandth at most
	return agents, m, nil
}

// Sum adds the runs to the report.
func Sum(r *report.Report, runs Runs) {
	agents := map[string]Result{}
	table := report.Table{Key: "rows", Title: "One Allocate on the success path, with images and ports", Columns: []string{"agents", "runs", "ns_per_op", "bytes_per_op", "allocs_per_op"}}
	line := report.Line{Name: "Allocate"}
	nanos, allocs := map[int]float64{}, 0.0
	for _, n := range slices.Sorted(maps.Keys(runs)) {
		var times, sizes, counts []float64
		for i, x := range runs[n] {
			times, sizes, counts = append(times, x.nanos), append(sizes, x.bytes), append(counts, x.allocs)
			r.Sample(strconv.Itoa(n), i, r.Began, x.nanos, "ns/op", "")
		}
		x := Result{stat.Quantile(times, 0.5), slices.Max(counts), stat.Quantile(sizes, 0.5), len(times)}
		agents[strconv.Itoa(n)] = x
		table.Rows = append(table.Rows, []any{n, x.Runs, x.NanosPerOp, x.BytesPerOp, x.AllocsPerOp})
		line.Points = append(line.Points, [2]float64{float64(n), x.NanosPerOp})
		nanos[n], allocs = x.NanosPerOp, max(allocs, x.AllocsPerOp)
	}
	if x, ok := nanos[1000]; ok {
		r.Value("ns_per_op_1000", x, "ns", "one Allocate at 1,000 agents")
	}
	if nanos[100] > 0 && nanos[100_000] > 0 {
		r.Value("growth_100_to_100000", nanos[100_000]/nanos[100], "", "Allocate at 100,000 agents over 100 agents")
	}
	r.Value("allocs_per_op_max", allocs, "", "allocations of one Allocate, the most at any number of agents")
	r.Extra = map[string]any{"agents": agents}
	r.Tables = append(r.Tables, table)
	r.Figure = report.Figure{Title: "One Allocate", X: "agents", Y: "nanoseconds", LogX: true, LogY: true, Lines: []report.Line{line}}
}
