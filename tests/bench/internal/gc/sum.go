package gc

import (
	"fmt"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// Measured is the result of one candidate in one round.
type Measured struct {
	Candidate string
	Round     int
	At        time.Time
	// Nodes is the number of objects between Empty and Full.
	Nodes       int
	Empty, Full Memory
	Pairs, Tree *Cascade
}

// Memory is a process's, in bytes: resident, its proportional share of that, and its heap after a garbage collection.
type Memory struct{ RSS, PSS, Heap int64 }

// Cascade is the deletion of dependents after their owners.
type Cascade struct {
	Objects int
	Began   time.Time
	// Deleted has the time of each deletion, since Began. If some were not deleted, they were watched for Watched.
	Deleted []time.Duration
	Watched time.Duration
	// CPU is the collector's, in seconds, Requests are its requests for single objects, until then.
	CPU, Requests float64
}

// Fraction is the part of all objects whose deletion was observed.
func (c *Cascade) Fraction() float64 { return stat.Ratio(float64(len(c.Deleted)), float64(c.Objects)) }

// Total is the time until all are deleted, in seconds. If they were not watched to the end, the rest is
// computed by the rate of the second half of the time, without a first burst. It is zero if nothing was deleted.
func (c *Cascade) Total() float64 {
	rest := float64(c.Objects - len(c.Deleted))
	if rest == 0 {
		return c.Watched.Seconds()
	}
	half, late := c.Watched/2, 0
	for _, at := range c.Deleted {
		if at > half {
			late++
		}
	}
	if late == 0 {
		return 0
	}
	return c.Watched.Seconds() + rest*half.Seconds()/float64(late)
}

// median is that of a number over a candidate's rounds.
func median(runs []Measured, candidate string, number func(Measured) float64) float64 {
	var all []float64
	for _, m := range runs {
		if m.Candidate == candidate {
			all = append(all, number(m))
		}
	}
	return stat.Quantile(all, 0.5)
}

// totals are one candidate's numbers, medians of its rounds.
type totals struct {
	tree, pairs, fraction       float64
	treeCPU, pairsCPU, requests float64
	perNode, heapPerNode, rss   float64
}

func total(runs []Measured, candidate string) totals {
	of := func(number func(Measured) float64) float64 { return median(runs, candidate, number) }
	return totals{
		tree:        of(func(m Measured) float64 { return m.Tree.Total() }),
		pairs:       of(func(m Measured) float64 { return m.Pairs.Total() }),
		fraction:    of(func(m Measured) float64 { return m.Tree.Fraction() }),
		treeCPU:     of(func(m Measured) float64 { return stat.Ratio(m.Tree.CPU, m.Tree.Fraction()) }),
		pairsCPU:    of(func(m Measured) float64 { return m.Pairs.CPU }),
		requests:    of(func(m Measured) float64 { return stat.Ratio(m.Tree.Requests, float64(len(m.Tree.Deleted))) }),
		perNode:     of(func(m Measured) float64 { return float64(m.Full.RSS-m.Empty.RSS) / float64(m.Nodes) }),
		heapPerNode: of(func(m Measured) float64 { return float64(m.Full.Heap-m.Empty.Heap) / float64(m.Nodes) }),
		rss:         of(func(m Measured) float64 { return float64(m.Full.RSS) / (1 << 20) }),
	}
}

// Sum adds what was measured to the report.
func Sum(r *report.Report, runs []Measured) {
	t := report.Table{Key: "candidates", Title: "Collectors", Columns: []string{"collector", "tree_s", "tree_fraction", "pairs_s",
		"tree_cpu_s", "pairs_cpu_s", "requests_per_object", "bytes_per_node", "heap_bytes_per_node", "rss_mib"}}
	all := map[string]totals{}
	for _, c := range []string{Ours, Default, Lifted} {
		x := total(runs, c)
		all[c] = x
		t.Rows = append(t.Rows, []any{c, x.tree, x.fraction, x.pairs, x.treeCPU, x.pairsCPU, x.requests, x.perNode, x.heapPerNode, x.rss})
		if x.tree > 0 {
			r.Value(c+"_tree_s", x.tree, "s", "from the deletion of the tree's owner until its last dependent is deleted")
		}
		r.Value(c+"_pairs_s", x.pairs, "s", "from the deletion of the first pair's owner until the last pair's dependent is deleted")
		r.Value(c+"_tree_cpu_s", x.treeCPU, "s", "CPU time of the collector for the tree")
		r.Value(c+"_pairs_cpu_s", x.pairsCPU, "s", "the same for the pairs")
		r.Value(c+"_requests_per_object", x.requests, "", "its requests for single objects for each dependent of the tree that is deleted")
		r.Value(c+"_bytes_per_node", x.perNode, "B", "resident memory with all objects, less that without, for each object")
		r.Value(c+"_heap_bytes_per_node", x.heapPerNode, "B", "the same of the heap after a garbage collection")
		r.Value(c+"_rss_mib", x.rss, "MiB", "resident memory with all objects")
	}
	ours, builtin, lifted := all[Ours], all[Default], all[Lifted]
	r.Value("default_measured_fraction", builtin.fraction, "", "part of the tree that default was seen to delete; the rest of its time and CPU is computed")
	for _, of := range []struct {
		what         string
		ours, theirs float64
		than         string
	}{
		{"tree", ours.tree, builtin.tree, Default}, {"pairs", ours.pairs, builtin.pairs, Default},
		{"tree", ours.tree, lifted.tree, Lifted}, {"pairs", ours.pairs, lifted.pairs, Lifted},
	} {
		if of.ours > 0 && of.theirs > 0 {
			r.Value(of.than+"_over_ours_"+of.what, of.theirs/of.ours, "", fmt.Sprintf("how many times faster services/gc is than %s", of.than))
			r.Value("ours_over_"+of.than+"_"+of.what, of.ours/of.theirs, "", "the inverse")
		}
	}
	memory(r, "ours_over_builtin_bytes_per_node", "resident memory of each node, over the lesser of kube-controller-manager's", ours.perNode, builtin.perNode, lifted.perNode)
	memory(r, "ours_over_builtin_heap_per_node", "the same of the heap", ours.heapPerNode, builtin.heapPerNode, lifted.heapPerNode)
	r.Tables = append(r.Tables, t)
	r.Figure = report.Figure{Title: "The tree's dependents after their owner", X: "seconds", Y: "deleted", LogX: true}
	for _, m := range runs {
		r.Sample(m.Candidate+"_tree", m.Round, m.Tree.Began, m.Tree.Total(), "s", fmt.Sprintf("%d of %d seen", len(m.Tree.Deleted), m.Tree.Objects))
		r.Sample(m.Candidate+"_pairs", m.Round, m.Pairs.Began, m.Pairs.Total(), "s", fmt.Sprintf("%d of %d seen", len(m.Pairs.Deleted), m.Pairs.Objects))
		r.Sample(m.Candidate+"_bytes_per_node", m.Round, m.At, float64(m.Full.RSS-m.Empty.RSS)/float64(m.Nodes), "B", "")
		r.Sample(m.Candidate+"_heap_bytes_per_node", m.Round, m.At, float64(m.Full.Heap-m.Empty.Heap)/float64(m.Nodes), "B", "")
		if m.Round == 0 {
			r.Figure.Lines = append(r.Figure.Lines, m.Tree.line(m.Candidate))
		}
	}
}

// memory adds a ratio, unless it would be one to nothing.
func memory(r *report.Report, key, what string, ours, a, b float64) {
	if least := min(a, b); ours > 0 && least > 0 {
		r.Value(key, ours/least, "", what)
	}
}

// points is how many of a line are drawn at most.
const points = 200

func (c *Cascade) line(name string) report.Line {
	l := report.Line{Name: name}
	step := max(1, len(c.Deleted)/points)
	for i := step - 1; i < len(c.Deleted); i += step {
		l.Points = append(l.Points, [2]float64{c.Deleted[i].Seconds(), float64(i + 1)})
	}
	return l
}
