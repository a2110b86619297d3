package janitor

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Measured is the result of a run, by ascending numbers of containers.
type Measured struct{ Sizes []*Size }

// Size is the result with one number of containers.
type Size struct {
	Containers int
	// Idle is a janitor that does not scan, Busy one that does.
	Idle, Busy *Window
	// Lists and Tasks are the baselines: one list of all containers, and one of all tasks, with containerd's Go client.
	Lists, Tasks []Call
}

// Call is one scan, or one call of a baseline; times in milliseconds. Of a single scan CPU is not known.
type Call struct {
	At        time.Time
	Wall, CPU float64
}

// CPU is that of three parties, in seconds, or, of one scan, in milliseconds.
type CPU struct{ Janitor, Containerd, Shims float64 }

// Window is what happened while a janitor was watched.
type Window struct {
	Began   time.Time
	Seconds float64
	CPU     CPU
	// Count is of scans; Scans has those that were timed one by one.
	Count int
	Scans []Call
	// Calls is what containerd has answered, by method.
	Calls map[string]int
	// Requests are the janitor's requests to the API server without watches, which are renewed every few minutes independently of
	// scans: those are Watches.
	Requests, Watches int
	// RSS is the janitor's greatest resident memory in MiB, Shims how many shims there were.
	RSS   float64
	Shims int
}

// asked counts the requests that came in the window.
func (w *Window) asked(all []request) {
	for _, r := range all {
		if r.Received.Before(w.Began) || r.Received.After(w.Began.Add(time.Duration(w.Seconds*float64(time.Second)))) {
			continue
		}
		if r.Verb == "watch" {
			w.Watches++
		} else {
			w.Requests++
		}
	}
}

// PerScan is the CPU of one scan, in milliseconds: what was used beyond an idle janitor's share of the time. A negative result,
// which is noise, becomes zero.
func (s *Size) PerScan() CPU {
	one := func(busy, idle float64) float64 {
		return 1000 * max(0, stat.Ratio(busy-stat.Ratio(idle, s.Idle.Seconds)*s.Busy.Seconds, float64(s.Busy.Count)))
	}
	return CPU{
		one(s.Busy.CPU.Janitor, s.Idle.CPU.Janitor), one(s.Busy.CPU.Containerd, s.Idle.CPU.Containerd), one(s.Busy.CPU.Shims, s.Idle.CPU.Shims),
	}
}

// calls is how many calls of containerd's a scan makes.
func (s *Size) calls() float64 {
	sum := 0
	for _, n := range s.Busy.Calls {
		sum += n
	}
	return stat.Ratio(float64(sum), float64(s.Busy.Count))
}

func walls(calls []Call) []float64 {
	out := make([]float64, 0, len(calls))
	for _, c := range calls {
		out = append(out, c.Wall)
	}
	return out
}

func meanCPU(calls []Call) float64 {
	out := make([]float64, 0, len(calls))
	for _, c := range calls {
		out = append(out, c.CPU)
	}
	return stat.Mean(out)
}

// Sum adds what was measured to the report. The values are those of the greatest number of containers.
func Sum(r *report.Report, m *Measured) {
	table := report.Table{Key: "sizes", Title: "One scan, by the number of containers", Columns: []string{
		"containers", "scans", "wall_p50_ms", "wall_p90_ms", "wall_max_ms", "cpu_ms", "cpu_us_per_container", "containerd_cpu_ms", "shims_cpu_ms",
		"containerd_calls", "api_requests", "rss_mib", "list_p50_ms", "list_cpu_ms", "tasks_p50_ms",
	}}
	var lines []report.Line
	for _, s := range m.Sizes {
		for _, series := range []struct {
			key, name string
			calls     []Call
		}{{"scan", "scan", s.Busy.Scans}, {"list", "list of containers", s.Lists}, {"tasks", "list of tasks", s.Tasks}} {
			for i, c := range series.calls {
				r.Sample(fmt.Sprintf("%s-%d", series.key, s.Containers), i, c.At, c.Wall, "ms", "")
			}
			lines = append(lines, report.Distribution(fmt.Sprintf("%s, %d", series.name, s.Containers), walls(series.calls)))
		}
		scan, one := stat.Of(walls(s.Busy.Scans)), s.PerScan()
		table.Rows = append(table.Rows, []any{
			s.Containers, s.Busy.Count, scan.P50, scan.P90, scan.Max, one.Janitor, 1000 * one.Janitor / float64(s.Containers), one.Containerd, one.Shims,
			s.calls(), s.Busy.Requests, s.Busy.RSS, stat.Quantile(walls(s.Lists), 0.5), meanCPU(s.Lists), stat.Quantile(walls(s.Tasks), 0.5),
		})
	}
	last := m.Sizes[len(m.Sizes)-1]
	last.values(r)
	if first := m.Sizes[0]; first != last && len(first.Busy.Scans) > 0 {
		r.Value("containers_growth", float64(last.Containers)/float64(first.Containers), "", "containers of the last row of the table over those of the first")
		r.Value("wall_growth", stat.Ratio(stat.Quantile(walls(last.Busy.Scans), 0.5), stat.Quantile(walls(first.Busy.Scans), 0.5)), "", "their scans' p50, the one over the other")
		r.Value("cpu_growth", stat.Ratio(last.PerScan().Janitor, first.PerScan().Janitor), "", "the janitor's CPU for one scan, the one over the other")
	}
	r.Fact("watches_renewed", last.Busy.Watches)
	r.Fact("containerd_calls", methods(last.Busy))
	r.Tables = append(r.Tables, table)
	r.Figure = report.Figure{Title: "One scan of a node, and lists of it", X: "milliseconds", Y: "share of all that took no longer", LogX: true, Lines: lines}
}

// values are those of one number of containers.
func (s *Size) values(r *report.Report) {
	scan, one := stat.Of(walls(s.Busy.Scans)), s.PerScan()
	list, n := stat.Quantile(walls(s.Lists), 0.5), float64(s.Containers)
	r.Value("containers", n, "", "managed containers on the node, all running and healthy")
	r.Value("scans", float64(s.Busy.Count), "", "scans that were measured")
	if scan.N > 0 {
		r.Value("wall_ms_p50", scan.P50, "ms", "one scan, by the janitor's own metric")
		r.Value("wall_ms_p90", scan.P90, "ms", "the same, p90")
		r.Value("scan_over_list", stat.Ratio(scan.P50, list), "", "one scan, p50, over one list of all containers, p50")
	}
	if s.Busy.Count > 0 {
		r.Value("cpu_ms_per_scan", one.Janitor, "ms", "the janitor's CPU time for one scan")
		r.Value("cpu_us_per_container", 1000*one.Janitor/n, "us", "the same for each container")
		r.Value("containerd_cpu_ms_per_scan", one.Containerd, "ms", "containerd's CPU time for one scan")
		r.Value("shims_cpu_ms_per_scan", one.Shims, "ms", "that of all shims")
		r.Value("containerd_calls_per_scan", s.calls(), "", "calls to containerd, by its own count")
		r.Value("api_requests_per_container", float64(s.Busy.Requests)/(n*float64(s.Busy.Count)), "", "requests to the API server for one container and scan, by the audit log")
	}
	r.Value("rss_mib", s.Busy.RSS, "MiB", "resident memory of the janitor, the greatest of one reading in each tick")
	r.Value("idle_cpu_cores", stat.Ratio(s.Idle.CPU.Janitor, s.Idle.Seconds), "cores", "the janitor's CPU seconds per second without scans, reading its metrics included")
	r.Value("list_ms_p50", list, "ms", "one list of all containers by containerd's Go client")
	r.Value("list_cpu_ms", meanCPU(s.Lists), "ms", "its client's CPU time")
	r.Value("tasks_ms_p50", stat.Quantile(walls(s.Tasks), 0.5), "ms", "one list of all tasks, for which containerd asks the shims")
}

// methods returns how often a scan calls each method of containerd.
func methods(w *Window) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(w.Calls)) {
		out = append(out, fmt.Sprintf("%s %.2f", name, stat.Ratio(float64(w.Calls[name]), float64(w.Count))))
	}
	return strings.Join(out, ", ")
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
