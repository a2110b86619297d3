package density

import (
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Group is one kind of container, all sizes in bytes.
type Group struct {
	Name string
	// Bodies is the PSS of each container's processes; Shim each one's share of its shim, of which there are Shims.
	Bodies []int64
	Shim   int64
	Shims  int
	// Taken is what each took from the machine's free memory, the kernel's own included.
	Taken int64
}

// Sum adds what the groups make to the report; one that is empty was not measured.
func Sum(r *report.Report, available int64, groups ...Group) {
	table := report.Table{Key: "memory", Title: "MiB of one container", Columns: []string{"kind", "n", "shims", "processes", "shim_share", "pss", "max_pss", "of_free_memory"}}
	r.Figure = report.Figure{Title: "Memory of one container (PSS)", Y: "MiB", Bars: []report.Bar{{Name: "its processes"}, {Name: "its share of the shim"}}}
	for _, g := range groups {
		if len(g.Bodies) == 0 {
			continue
		}
		var bodies []float64
		for _, b := range g.Bodies {
			bodies = append(bodies, mib(b))
		}
		x := stat.Of(bodies)
		body, shim := x.Mean, mib(g.Shim)
		table.Rows = append(table.Rows, []any{g.Name, x.N, g.Shims, body, shim, body + shim, x.Max + shim, mib(g.Taken)})
		r.Value(g.Name+"_mib", body+shim, "MiB", "PSS of one, its share of the shim included, mean")
		r.Value(g.Name+"_shim_mib", shim, "MiB", "the share of the shim in that")
		r.Value(g.Name+"_taken_mib", mib(g.Taken), "MiB", "what one took from the machine's free memory in a real filling, the kernel's own included")
		r.Value(g.Name+"_fit", float64(fit(available, g)), "", "how many fit into the free memory, by the greater of the two figures")
		r.Figure.Groups = append(r.Figure.Groups, g.Name)
		r.Figure.Bars[0].Values = append(r.Figure.Bars[0].Values, body)
		r.Figure.Bars[1].Values = append(r.Figure.Bars[1].Values, shim)
	}
	r.Tables = append(r.Tables, table)
}

// fit is how many of a kind have room in the free memory.
func fit(available int64, g Group) int64 {
	var sum int64
	for _, b := range g.Bodies {
		sum += b
	}
	each := max(sum/int64(len(g.Bodies))+g.Shim, g.Taken, 1)
	return available / each
}

func mib(bytes int64) float64 { return float64(bytes) / (1 << 20) }
