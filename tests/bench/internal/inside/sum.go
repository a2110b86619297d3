package inside

import (
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Sum adds what the samples make to the report. A ratio to something that was not measured is left out.
func Sum(r *report.Report) {
	of := map[string]stat.Summary{}
	table := report.Table{Key: "series", Title: "Milliseconds", Columns: []string{"series", "n", "p50_ms", "p90_ms", "p99_ms", "max_ms"}}
	r.Figure = report.Figure{Title: "In a sandbox", Y: "ms", LogY: true, Bars: []report.Bar{{Name: "p50"}}}
	for _, name := range []string{RawCreate, RawExec, Run, RunAgent, FirstOutput, Echo} {
		x := stat.Of(r.Of(name))
		if of[name] = x; x.N == 0 {
			continue
		}
		table.Rows = append(table.Rows, []any{name, x.N, x.P50, x.P90, x.P99, x.Max})
		r.Figure.Groups = append(r.Figure.Groups, name)
		r.Figure.Bars[0].Values = append(r.Figure.Bars[0].Values, x.P50)
	}
	r.Tables = append(r.Tables, table)
	ratio := func(key string, value, reference float64, what string) {
		if value > 0 && reference > 0 {
			r.Value(key, value/reference, "", what)
		}
	}
	number := func(key string) float64 { x, _ := r.Number(key); return x }
	ratio("run_over_exec_p50", of[Run].P50, of[RawExec].P50, "RunProcess p50 over raw exec p50")
	ratio("run_over_exec_p99", of[Run].P99, of[RawExec].P50, "RunProcess p99 over raw exec p50")
	ratio("run_agent_ms", of[RunAgent].P50, 1, "RunProcess at the agent, p50")
	ratio("first_output_over_raw_p50", of[FirstOutput].P50, of[RawCreate].P50, "first output p50 over raw create p50")
	ratio("first_output_over_raw_p99", of[FirstOutput].P99, of[RawCreate].P50, "first output p99 over raw create p50")
	ratio("terminal_echo_ms", of[Echo].P50, 1, "terminal echo p50")
	ratio("write_over_stream", number("write_mib_per_second"), number("up_mib_per_second"), "WriteFile over the plain stream")
	ratio("read_over_stream", number("read_mib_per_second"), number("down_mib_per_second"), "ReadFile over the plain stream")
}
