package create

import (
	"fmt"
	"maps"
	"slices"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// conditions adds what the numbers depend on.
func (s *suite) conditions(slots mesh.Slots) {
	r := s.report
	counts := map[string]int{}
	for _, x := range r.Samples {
		counts[x.Series]++
	}
	r.Fact("handler", s.Handler)
	r.Fact("samples", counts)
	r.Fact("warmup_rounds", warmups)
	r.Fact("concurrency", 1)
	r.Fact("pause_max", s.Pause.String())
	r.Fact("seed", s.Seed)
	r.Fact("cache", "image pulled and unpacked; page cache warm")
	r.Fact("image", mesh.Image)
	r.Fact("connection", s.Way)
	r.Fact("raw", "containerd client: NewContainer (new snapshot), NewTask, Start; the OCI spec of a cold sandbox; a shim of its own")
	kept := fmt.Sprint(slots.Wanted)
	if slots.Off != "" {
		kept += ": " + slots.Off
	}
	r.Fact("slots_kept", kept)
	var paths []string
	for _, k := range slices.Sorted(maps.Keys(s.paths)) {
		paths = append(paths, fmt.Sprintf("%s %d", k, s.paths[k]))
	}
	r.Fact("paths", paths)
}

// sum makes values, tables and verdicts of the samples.
func (s *suite) sum() {
	Sum(s.report)
	s.report.Tables = append(s.report.Tables, s.stageTable())
	s.report.Judge(budget.Create(s.Handler))
}

// Sum adds the values that the samples in the report make, and leaves out those that nothing was measured for.
func Sum(r *report.Report) {
	of := map[string]stat.Summary{}
	table := report.Table{Key: "series", Title: "Milliseconds from call to answer", Columns: []string{"series", "n", "min", "p50", "p90", "p99", "max", "mean"}}
	r.Figure = report.Figure{Title: "One create, from call to answer", X: "milliseconds", Y: "share of creates", LogX: true}
	for _, name := range []string{Raw, Slot, HostUsers, Strayed, Cold, Strong, Pod} {
		samples := r.Of(name)
		if len(samples) == 0 {
			continue
		}
		x := stat.Of(samples)
		of[name] = x
		table.Rows = append(table.Rows, []any{name, x.N, x.Min, x.P50, x.P90, x.P99, x.Max, x.Mean})
		r.Figure.Lines = append(r.Figure.Lines, report.Distribution(name, samples))
	}
	value := func(key, unit, what string, number float64, of ...stat.Summary) {
		for _, x := range of {
			if x.N == 0 {
				return
			}
		}
		r.Value(key, number, unit, what)
	}
	raw, slot, hostUsers, cold, strong, pod := of[Raw], of[Slot], of[HostUsers], of[Cold], of[Strong], of[Pod]
	value("raw_p50_ms", "ms", "containerd create and start", raw.P50, raw)
	value("slot_p50_ms", "ms", "fast create that claims a slot", slot.P50, slot)
	value("slot_p99_ms", "ms", "the same, p99", slot.P99, slot)
	value("cold_p50_ms", "ms", "fast create on the cold path", cold.P50, cold)
	value("strong_p50_ms", "ms", "strong create", strong.P50, strong)
	value("pod_p50_ms", "ms", "Pod of plain Kubernetes, create to Ready", pod.P50, pod)
	value("slot_over_raw_p50", "", "slot p50 over raw p50", stat.Ratio(slot.P50, raw.P50), slot, raw)
	value("slot_over_raw_p99", "", "slot p99 over raw p50", stat.Ratio(slot.P99, raw.P50), slot, raw)
	value("users_on_over_off_p50", "", "slot p50 over slot p50 without user namespaces", stat.Ratio(slot.P50, hostUsers.P50), slot, hostUsers)
	value("cold_over_raw", "", "cold p50 over raw p50", stat.Ratio(cold.P50, raw.P50), cold, raw)
	value("cold_over_raw_p50", "", "the same, by the name that the budgets of handler fsb use", stat.Ratio(cold.P50, raw.P50), cold, raw)
	value("strong_over_pod", "", "strong p50 over Pod p50", stat.Ratio(strong.P50, pod.P50), strong, pod)
	value("pod_over_slot", "", "Pod p50 over slot p50", stat.Ratio(pod.P50, slot.P50), pod, slot)
	r.Value("slot_went_cold", float64(of[Strayed].N), "", "creates that were to claim a slot and went cold; not among the slot samples")
	r.Tables = append(r.Tables, table)
}

// stageTable is the breakdown of each series of ours; how far it adds up becomes a value.
func (s *suite) stageTable() report.Table {
	t := report.Table{Key: "stages", Title: "Where the time goes, milliseconds", Columns: []string{"series", "stage", "n", "p50_ms", "mean_ms", "share"}}
	for _, name := range []string{Slot, HostUsers, Strayed, Cold, Strong} {
		b := s.stages[name]
		if b == nil {
			continue
		}
		rows, over := b.Rows()
		for _, x := range rows {
			t.Rows = append(t.Rows, []any{name, x.Name, x.N, x.P50, x.Mean, x.Share})
		}
		s.report.Value(name+"_stages_over_client", over, "", "sum of the stages' p50, the part outside of them included, over the client's p50")
	}
	return t
}
