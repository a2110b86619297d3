package scale

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Measured is the result of a run.
type Measured struct {
	// Start is the time from the start of an allocator until it knew all agents and all their sandboxes.
	Start time.Duration
	// Lists is the time until it answered a list of sandboxes, which needs the whole of all custom resources.
	Lists time.Duration
	// Idle is without creates, Busy with them.
	Idle, Busy Usage
	Creates    []Timed
	Deletes    int
	Errors     []string
	Takeover   time.Duration
}

// Timed is one create.
type Timed struct {
	At   time.Time
	Took time.Duration
}

// Usage is what the leading allocator used over some time: CPU seconds per second and the greatest resident memory in MiB.
type Usage struct {
	Cores, RSS               float64
	StandbyCores, StandbyRSS float64
	Points                   []UsagePoint
}

// UsagePoint is one second of that.
type UsagePoint struct {
	At         time.Time
	Cores, RSS float64
}

// Sum adds what was measured to the report.
func Sum(r *report.Report, m *Measured) {
	var took []float64
	for i, c := range m.Creates {
		took = append(took, millis(c.Took))
		r.Sample("create", i, c.At, millis(c.Took), "ms", "")
	}
	cores := report.Line{Name: "CPU of the leading allocator"}
	for i, p := range m.Busy.Points {
		r.Sample("cpu", i, p.At, p.Cores, "cores", "")
		r.Sample("rss", i, p.At, p.RSS, "MiB", "")
		cores.Points = append(cores.Points, [2]float64{p.At.Sub(m.Busy.Points[0].At).Seconds() + 1, p.Cores})
	}
	x := stat.Of(took)
	r.Value("cpu_cores", m.Busy.Cores, "cores", "CPU seconds of the leading allocator per second, under load")
	r.Value("rss_mib", m.Busy.RSS, "MiB", "its resident memory, the greatest of one reading each second")
	r.Value("idle_cpu_cores", m.Idle.Cores, "cores", "the same with heartbeats alone")
	if x.N > 0 {
		r.Value("create_p50_ms", x.P50, "ms", "a create, client to reply")
		r.Value("create_p99_ms", x.P99, "ms", "the same, p99")
	}
	r.Value("takeover_s", m.Takeover.Seconds(), "s", "from SIGKILL of the leader to the standby's first answer to a create")
	r.Value("start_s", m.Start.Seconds(), "s", "from the start of an allocator to its knowing all agents and sandboxes")
	r.Value("lists_s", m.Lists.Seconds(), "s", "from the same to its first answer to a list of sandboxes")
	r.Value("standby_cpu_cores", m.Busy.StandbyCores, "cores", "CPU seconds of the standby per second, under load")
	r.Value("standby_rss_mib", m.Busy.StandbyRSS, "MiB", "resident memory of the standby")
	r.Value("errors", float64(len(m.Errors)), "", "creates and deletes that failed")
	t := report.Table{Key: "creates", Title: "Creates, milliseconds", Columns: []string{"n", "min", "p50", "p90", "p99", "max", "mean"}}
	t.Rows = append(t.Rows, []any{x.N, x.Min, x.P50, x.P90, x.P99, x.Max, x.Mean})
	r.Tables = append(r.Tables, t)
	if len(m.Errors) > 0 {
		r.Fact("first_error", m.Errors[0])
	}
	r.Figure = report.Figure{Title: "The leading allocator under load", X: "seconds", Y: "cores", Lines: []report.Line{cores}}
}

func millis(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
