package burst

import (
	"fmt"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Burst is one burst.
type Burst struct {
	Name string
	// Slots is how many slots the pool was to have, Kept how many it had when the burst began.
	Slots, Kept int
	// Millis is what each caller waited, Done when each was answered, since the burst began.
	Millis, Done []float64
	// Paths counts the ways by which sandboxes came to run.
	Paths map[string]int
	// Wall is the time until all ran.
	Wall time.Duration
	// Refill is how many slots came each second after that, until RefillTime, when all were there again.
	Refill     float64
	RefillTime time.Duration
	// Missing is how many slots were missing when that began.
	Missing int

	ended time.Time
}

// Sum adds what the bursts and the raw samples make to the report. A burst on a pool that had not the slots which its name
// promises is in the table alone. Refills count where at least half of the slots were missing, because others came during the creates;
// drained is nil if that was not measured.
func Sum(r *report.Report, bursts []Burst, drained *Burst) {
	raw := stat.Of(r.Of(RawSeries))
	if raw.N > 0 {
		r.Value("raw_p50_ms", raw.P50, "ms", "containerd create and start, one at a time")
	}
	table := report.Table{Key: "bursts", Title: "Bursts", Columns: []string{
		"slots_for", "slots", "kept", "n", "by_slot", "by_cold", "p50_ms", "p99_ms", "max_ms", "all_run_ms", "per_s", "refill_per_s", "refill_s",
	}}
	figure := report.Figure{Title: "All at once: how many run", X: "milliseconds since the burst", Y: "sandboxes"}
	for _, b := range bursts {
		x := stat.Of(b.Millis)
		rate := stat.Ratio(float64(x.N), b.Wall.Seconds())
		table.Rows = append(table.Rows, []any{
			b.Name, b.Slots, b.Kept, x.N, b.Paths["slot"], b.Paths["cold"], x.P50, x.P99, x.Max, millis(b.Wall), rate, b.Refill, b.RefillTime.Seconds(),
		})
		line := report.Line{Name: fmt.Sprintf("slots for %s (%d)", b.Name, b.Kept)}
		done := slices.Sorted(slices.Values(b.Done))
		for i, at := range done {
			line.Points = append(line.Points, [2]float64{at, float64(i + 1)})
		}
		figure.Lines = append(figure.Lines, line)
		if x.N == 0 || b.Kept != b.Slots {
			continue
		}
		r.Value(b.Name+"_p50_ms", x.P50, "ms", "slots for "+b.Name+": p50")
		r.Value(b.Name+"_p99_ms", x.P99, "ms", "slots for "+b.Name+": p99")
		r.Value(b.Name+"_per_s", rate, "1/s", "slots for "+b.Name+": sandboxes a second until all ran")
		if b.Refill > 0 {
			r.Value(b.Name+"_refill_per_s", b.Refill, "1/s", "slots for "+b.Name+": slots a second after the last answer")
		}
		if raw.N > 0 {
			r.Value(b.Name+"_p99_over_raw_p50", stat.Ratio(x.P99, raw.P50), "", "slots for "+b.Name+": p99 over raw p50")
		}
	}
	if drained != nil && drained.Kept == drained.Slots && 2*drained.Missing >= drained.Slots {
		r.Value("refill_per_s", drained.Refill, "1/s", "slots a second on an idle machine, from the last answer of creates that claimed all of them, until all are free again")
		r.Value("refill_missing", float64(drained.Missing), "", "how many slots that were")
	}
	r.Tables, r.Figure = append(r.Tables, table), figure
}
