package render

import (
	"maps"
	"slices"
	"time"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
)

// Trace returns a table of the spans of a trace as a tree: children follow the span that caused them, in the order of their
// start. START is counted from the first span. A span whose cause is missing is a root.
func Trace(spans []jaeger.Span) *Table {
	t := NewTable("START", "DURATION", "SERVICE", "SPAN")
	known := map[string]bool{}
	for _, s := range spans {
		known[s.ID] = true
	}
	children := map[string][]jaeger.Span{}
	for _, s := range spans {
		parent := s.Parent
		if !known[parent] || parent == s.ID {
			parent = ""
		}
		children[parent] = append(children[parent], s)
	}
	for _, parent := range slices.Sorted(maps.Keys(children)) {
		slices.SortStableFunc(children[parent], func(a, b jaeger.Span) int { return a.Start.Compare(b.Start) })
	}
	if len(children[""]) == 0 {
		return t
	}
	begin := children[""][0].Start
	for _, s := range spans {
		if s.Start.Before(begin) {
			begin = s.Start // clocks of several nodes
		}
	}
	tree := spanTree{table: t, children: children, begin: begin}
	for _, root := range children[""] {
		tree.add(root, "", "")
	}
	return t
}

// spanTree adds spans to a table.
type spanTree struct {
	table    *Table
	children map[string][]jaeger.Span
	begin    time.Time
}

// add adds a span and the spans that it caused. branch is drawn before its name, stem before the names below it.
func (t spanTree) add(s jaeger.Span, branch, stem string) {
	name := s.Name
	if s.Error != "" {
		name += " (failed: " + s.Error + ")"
	}
	t.table.Add(Millis(s.Start.Sub(t.begin))+" ms", Millis(s.Duration)+" ms", s.Service, branch+name)
	below := t.children[s.ID]
	for i, child := range below {
		if i == len(below)-1 {
			t.add(child, stem+"└─ ", stem+"   ")
		} else {
			t.add(child, stem+"├─ ", stem+"│  ")
		}
	}
}
