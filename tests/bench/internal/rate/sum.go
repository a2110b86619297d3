package rate

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Measured is the result of a run.
type Measured struct {
	// Rate is the one that held for the whole duration; zero if none did.
	Rate float64
	// Confirmed is the trial of Rate, and Used its CPU time.
	Confirmed Trial
	Used      Usage
	// Trials are all of them, in their order.
	Trials []Trial
	// Raw is raw containers before and after.
	Raw Reference
	// Idle is the CPU time when nothing happens.
	Idle Usage
}

// conditions adds what the numbers depend on.
func (s *suite) conditions(slots mesh.Slots) {
	r := s.report
	r.Fact("handler", s.Handler)
	r.Fact("samples", fmt.Sprintf("%d creates in %v, %d raw containers", len(s.result.Confirmed.Millis), s.Duration, len(s.result.Raw.Millis)))
	r.Fact("concurrency", fmt.Sprintf("creates at a constant rate on %d connections, whether or not earlier ones are answered; %d raw containers at a time", connections, rawParallel))
	r.Fact("cache", "image pulled and unpacked; page cache warm; all slots free at first")
	r.Fact("pool", fmt.Sprintf("one agent with a capacity of %d, which keeps %d slots %s", s.Places, slots.Wanted, slots.Off))
	r.Fact("search", fmt.Sprintf("%d trials; %v each, and %v at the rate that was found; p99 at most %v; within %g %%", len(s.result.Trials), s.Probe, s.Duration, s.Limit, 100*s.Precision))
	r.Fact("cpu", "of cgroup "+clusterCgroup+", without what the same time takes when nothing happens; Kubernetes' own processes are no part of the mesh")
	r.Fact("image", mesh.Image)
	r.Fact("connection", s.Way)
	r.Fact("raw", "containerd client: NewContainer (new snapshot), NewTask, Start, kill, delete; the OCI spec of a cold sandbox; a shim of its own")
}

// Sum adds what was measured to the report, and leaves out what nothing was measured for.
func Sum(r *report.Report, m Measured, limit time.Duration) {
	raw := m.Raw.PerSecond()
	if raw > 0 {
		r.Value("raw_per_s", raw, "1/s", fmt.Sprintf("raw containers created, started and deleted each second, %d in parallel", rawParallel))
		r.Value("raw_p50_ms", stat.Quantile(m.Raw.Millis, 0.5), "ms", "one of these, its deletion included")
	}
	if m.Rate > 0 {
		x := stat.Of(m.Confirmed.Millis)
		r.Value("rate_per_s", m.Rate, "1/s", "highest rate of creates and deletes that held for the whole duration")
		if raw > 0 {
			r.Value("rate_over_raw", stat.Ratio(m.Rate, raw), "", "that over raw_per_s")
		}
		r.Value("p50_ms", x.P50, "ms", "a create at that rate, from its scheduled arrival to its answer")
		r.Value("p99_ms", x.P99, "ms", "the same, p99")
		r.Value("by_slot", stat.Ratio(float64(m.Confirmed.Paths["slot"]), float64(x.N)), "", "the share of these that claimed a slot")
		r.Value("drain_s", m.Confirmed.Drain.Seconds(), "s", "from the last answer until all were deleted")
		sumCPU(r, m)
	}
	table := report.Table{Key: "trials", Title: "Trials", Columns: []string{"rate", "seconds", "n", "by_slot", "by_cold", "p50_ms", "p99_ms", "max_ms", "failed", "skipped", "drain_s", "held", "error"}}
	var points [][2]float64
	for _, t := range m.Trials {
		x := stat.Of(t.Millis)
		held, why := t.Held(limit)
		if t.Error != "" {
			why += ": " + t.Error
		}
		if held {
			why = ""
		}
		table.Rows = append(table.Rows, []any{
			t.Rate, t.Duration.Seconds(), x.N, t.Paths["slot"], t.Paths["cold"], x.P50, x.P99, x.Max, t.Failed, t.Skipped, t.Drain.Seconds(), held, why,
		})
		points = append(points, [2]float64{t.Rate, x.P99})
	}
	slices.SortStableFunc(points, func(a, b [2]float64) int { return cmp.Compare(a[0], b[0]) })
	r.Tables = append([]report.Table{table}, r.Tables...)
	r.Figure = report.Figure{Title: "Latency by rate", X: "creates and deletes a second", Y: "milliseconds", LogY: true, Lines: []report.Line{{Name: "p99 of each trial", Points: points}}}
}

// sumCPU adds the CPU time of one create and delete.
func sumCPU(r *report.Report, m Measured) {
	ours, raw := m.Used.Each(len(m.Confirmed.Millis), m.Idle), m.Raw.Used.Each(len(m.Raw.Millis), m.Idle)
	if len(ours) == 0 || len(raw) == 0 {
		return
	}
	sum := func(of map[string]float64) (out float64) {
		for _, part := range ofMesh() {
			out += of[part]
		}
		return out
	}
	r.Value("cpu_ms", sum(ours), "ms", "CPU time of one create and delete at that rate: agents, allocators, containerd, shims and sandboxes")
	r.Value("raw_cpu_ms", sum(raw), "ms", "CPU time of one raw container, created, started and deleted: containerd, shim, runc and the container")
	r.Value("cpu_over_raw", stat.Ratio(sum(ours), sum(raw)), "", "cpu_ms over raw_cpu_ms")
	r.Value("etcd_cpu_ms", ours[Etcd], "ms", "CPU time of etcd for one create and delete, which is not in cpu_ms")
	r.Value("apiserver_cpu_ms", ours[APIServer], "ms", "the same of kube-apiserver")
	table := report.Table{Key: "cpu", Title: "CPU time of one, milliseconds, and of nothing, cores", Columns: []string{"part", "in_mesh", "ours_ms", "raw_ms", "idle_cores"}}
	for _, part := range parts() {
		table.Rows = append(table.Rows, []any{part, slices.Contains(ofMesh(), part), ours[part], raw[part], stat.Ratio(m.Idle.Parts[part], m.Idle.Wall.Seconds())})
	}
	r.Tables = append(r.Tables, table)
}

// describe is a line about a trial.
func describe(t Trial, held bool, why string) string {
	x := stat.Of(t.Millis)
	verdict := "held"
	if !held {
		verdict = "did not hold: " + why
	}
	if t.Error != "" {
		verdict += ": " + t.Error
	}
	return fmt.Sprintf("%.1f a second for %v: p50 %.0f ms, p99 %.0f ms, %d by slot, %d cold, deleted after %.1f s: %s",
		t.Rate, t.Duration, x.P50, x.P99, t.Paths["slot"], t.Paths["cold"], t.Drain.Seconds(), verdict)
}
