package render

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
)

// KindName returns a kind as Kind.group.
func KindName(k *gcv1.Kind) string {
	if k.GetGroup() == "" {
		return k.GetKind()
	}
	return k.GetKind() + "." + k.GetGroup()
}

// KindWord returns a kind as kubectl writes it before names: deployment.apps.
func KindWord(k *gcv1.Kind) string { return strings.ToLower(KindName(k)) }

// ParsePolicy returns the propagation policy of a value of kubectl's --cascade; false if there is no such policy.
func ParsePolicy(s string) (gcv1.PropagationPolicy, bool) {
	n, ok := parse(gcv1.PropagationPolicy(0), policyPrefix, s)
	return gcv1.PropagationPolicy(n), ok
}

const policyPrefix = "PROPAGATION_POLICY_"

// objectName returns an object without its namespace.
func objectName(p *gcv1.Place) string { return KindName(p.GetKind()) + "/" + p.GetName() }

// fullName returns an object with its namespace.
func fullName(p *gcv1.Place) string {
	if p.GetNamespace() == "" {
		return KindName(p.GetKind()) + " " + p.GetName()
	}
	return KindName(p.GetKind()) + " " + p.GetNamespace() + "/" + p.GetName()
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// Preview writes a preview as a tree with a summary.
func Preview(w io.Writer, all []*gcv1.Consequence, summary *gcv1.PreviewSummary, wide bool) error {
	header := []string{"OUTCOME", "OBJECT", "NAMESPACE"}
	if wide {
		header = append(header, "UID", "FINALIZERS")
	}
	t := NewTable(header...)
	children := map[string][]*gcv1.Consequence{}
	for _, c := range all {
		children[c.GetVia()] = append(children[c.GetVia()], c)
	}
	var branch func(of []*gcv1.Consequence, stem string)
	branch = func(of []*gcv1.Consequence, stem string) {
		for i, c := range of {
			knot, next := "├─ ", "│  "
			if i == len(of)-1 {
				knot, next = "└─ ", "   "
			}
			if c.GetDepth() == 0 {
				knot, next = "", ""
			}
			o := c.GetObject()
			row := []string{word(c.GetOutcome().String(), "OUTCOME_"), stem + knot + objectName(o.GetPlace()), o.GetPlace().GetNamespace()}
			if wide {
				row = append(row, o.GetUid(), strings.Join(o.GetFinalizers(), ","))
			}
			t.Add(row...)
			branch(children[o.GetUid()], stem+next)
		}
	}
	branch(children[""], "")
	if err := t.Flush(w); err != nil {
		return err
	}
	return previewSums(w, summary)
}

// previewSums writes the number of objects of each kind for each outcome.
func previewSums(w io.Writer, summary *gcv1.PreviewSummary) error {
	var b strings.Builder
	for _, outcome := range []struct {
		of   gcv1.Outcome
		text string
	}{
		{gcv1.Outcome_OUTCOME_GOES, "would be deleted"},
		{gcv1.Outcome_OUTCOME_STAYS, "would lose an owner and be kept"},
		{gcv1.Outcome_OUTCOME_HELD, "would be deleted, but whether another owner exists is not known"},
	} {
		total, kinds := int32(0), []string{}
		for _, c := range summary.GetCounts() {
			if c.GetOutcome() == outcome.of {
				total += c.GetCount()
				kinds = append(kinds, fmt.Sprintf("%d %s", c.GetCount(), KindName(c.GetKind())))
			}
		}
		if total > 0 {
			fmt.Fprintf(&b, "\n%d %s (%s)", total, outcome.text, strings.Join(kinds, ", "))
		}
	}
	_, err := io.WriteString(w, b.String()+"\n")
	return err
}

// Graph returns a table of the neighborhood of an object.
func Graph(g *gcv1.GetGraphResponse, wide bool) *Table { return graphTable(g, wide, true) }

// WholeGraph returns a table of a graph without a center, ordered by namespace, kind and name.
func WholeGraph(g *gcv1.GetGraphResponse, wide bool) *Table {
	ordered := &gcv1.GetGraphResponse{Vertices: slices.Clone(g.GetVertices()), References: g.GetReferences()}
	slices.SortStableFunc(ordered.GetVertices(), func(a, b *gcv1.Vertex) int {
		x, y := a.GetObject().GetPlace(), b.GetObject().GetPlace()
		return cmp.Or(cmp.Compare(x.GetNamespace(), y.GetNamespace()), cmp.Compare(objectName(x), objectName(y)))
	})
	return graphTable(ordered, wide, false)
}

func graphTable(g *gcv1.GetGraphResponse, wide, distance bool) *Table {
	header := []string{"OBJECT", "NAMESPACE", "STATE", "OWNERS"}
	if distance {
		header = append([]string{"DISTANCE"}, header...)
	}
	if wide {
		header = append(header, "UID", "FINALIZERS")
	}
	t := NewTable(header...)
	names, owners := map[string]string{}, map[string][]string{}
	for _, v := range g.GetVertices() {
		names[v.GetObject().GetUid()] = objectName(v.GetObject().GetPlace())
	}
	for _, r := range g.GetReferences() {
		text := names[r.GetOwner()]
		if text == "" {
			text = r.GetOwner()
		}
		what := word(r.GetStanding().String(), "STANDING_")
		if r.GetBlock() {
			what += ", blocks"
		}
		owners[r.GetDependent()] = append(owners[r.GetDependent()], text+" ("+what+")")
	}
	for _, v := range g.GetVertices() {
		o := v.GetObject()
		state := word(v.GetState().String(), "STATE_")
		if v.GetVirtual() {
			state = "NotSeen"
		}
		row := []string{names[o.GetUid()], o.GetPlace().GetNamespace(), state, strings.Join(owners[o.GetUid()], "; ")}
		if distance {
			row = append([]string{fmt.Sprint(v.GetDistance())}, row...)
		}
		if wide {
			row = append(row, o.GetUid(), strings.Join(o.GetFinalizers(), ","))
		}
		t.Add(row...)
	}
	return t
}

// Dot writes a graph in the Graphviz language, as the server draws a neighborhood: arrows lead from owners to dependents.
func Dot(w io.Writer, g *gcv1.GetGraphResponse) error {
	var b strings.Builder
	b.WriteString("digraph owners {\n  node [shape=box];\n")
	for _, v := range g.GetVertices() {
		o := v.GetObject()
		label := KindName(o.GetPlace().GetKind()) + "\n" + o.GetPlace().GetName()
		if o.GetPlace().GetNamespace() != "" {
			label = KindName(o.GetPlace().GetKind()) + "\n" + o.GetPlace().GetNamespace() + "/" + o.GetPlace().GetName()
		}
		style := "solid"
		switch {
		case v.GetVirtual():
			style = "dashed"
		case o.GetDeleting() || v.GetState() == gcv1.State_STATE_DOOMED:
			style = "dotted"
		}
		if v.GetState() != gcv1.State_STATE_UNSPECIFIED {
			label += "\n" + word(v.GetState().String(), "STATE_")
		}
		fmt.Fprintf(&b, "  %q [label=%q, style=%s];\n", o.GetUid(), label, style)
	}
	for _, r := range g.GetReferences() {
		width := 1
		if r.GetBlock() {
			width = 2
		}
		fmt.Fprintf(&b, "  %q -> %q [label=%q, penwidth=%d];\n", r.GetOwner(), r.GetDependent(), word(r.GetStanding().String(), "STANDING_"), width)
	}
	b.WriteString("}\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// Deletions returns an empty table of deletions.
func Deletions(wide bool) *Table {
	header := []string{"TIME", "OBJECT", "NAMESPACE", "CAUSE", "POLICY"}
	if wide {
		header = append(header, "UID")
	}
	return NewTable(header...)
}

// DeletionRow returns the row of a deletion.
func DeletionRow(d *gcv1.WatchDeletionsResponse, wide bool) []string {
	p := d.GetObject().GetPlace()
	row := []string{d.GetTime().AsTime().Format(time.RFC3339), objectName(p), p.GetNamespace(), word(d.GetCause().String(), "CAUSE_"),
		word(d.GetPolicy().String(), policyPrefix)}
	if wide {
		row = append(row, d.GetObject().GetUid())
	}
	return row
}

// CollectorRow returns the row of a garbage collector: its Pod, whether it deletes, the size of its graph, and errors.
func CollectorRow(pod string, s *gcv1.GetStatusResponse) []string {
	failing := make([]string, len(s.GetFailing()))
	for i, f := range s.GetFailing() {
		failing[i] = f.GetResource() + " (" + f.GetError() + ")"
	}
	return []string{pod, yesNo(s.GetEnforcing()), fmt.Sprint(s.GetObjects()), fmt.Sprint(s.GetVirtualOwners()), fmt.Sprint(s.GetReferences()),
		strings.Join(failing, "; "), s.GetStopped()}
}
