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
	if len(spans) == 0 {
		return t
	}
	begin := spans[0].Start
	for _, s := range spans {
		if s.Start.Before(begin) {
			begin = s.Start
		}
	}
	tree := spanTree{table: t, children: children, begin: begin, drawn: map[string]bool{}}
	for _, root := range children[""] {
		tree.add(root, "", "")
	}
	for _, s := range spans { // spans that cause each other, in a broken trace
		tree.add(s, "", "")
	}
	return t
}

// spanTree adds spans to a table.
type spanTree struct {
	table    *Table
	children map[string][]jaeger.Span
	begin    time.Time
	drawn    map[string]bool
}

// add adds a span and the spans that it caused, unless it was added before. branch is drawn before its name, stem before the
// names below it.
func (t spanTree) add(s jaeger.Span, branch, stem string) {
	if t.drawn[s.ID] {
		return
	}
	t.drawn[s.ID] = true
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
