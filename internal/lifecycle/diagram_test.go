package lifecycle_test

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// render returns the state diagram of the package comment, in Mermaid's syntax, as Next implements it: the events that leave a
// phase, with a note if they do so only while the sandbox is assigned, or only while it is not.
func render() []string {
	type edge struct{ from, to lifecycle.Phase }
	var edges []edge
	how := map[edge]map[lifecycle.Event][]state{}
	for _, from := range lifecycle.Phases() {
		for _, to := range lifecycle.Phases() {
			e := edge{from, to}
			for _, ev := range lifecycle.Events() {
				for _, s := range []state{{Phase: from}, {Phase: from, Assigned: true}} {
					if got, _, ok := lifecycle.Next(s, ev); ok && got == to && from != to {
						if how[e] == nil {
							how[e] = map[lifecycle.Event][]state{}
							edges = append(edges, e)
						}
						how[e][ev] = append(how[e][ev], s)
					}
				}
			}
		}
	}
	name := func(p lifecycle.Phase) string {
		if p == none || p == gone {
			return "[*]"
		}
		return string(p)
	}
	out := []string{"//\tstateDiagram-v2"}
	for _, e := range edges {
		always, assigned, unassigned := []string{}, []string{}, []string{}
		for _, ev := range lifecycle.Events() {
			switch states := how[e][ev]; {
			case len(states) == 2:
				always = append(always, ev.String())
			case len(states) == 1 && states[0].Assigned:
				assigned = append(assigned, ev.String())
			case len(states) == 1:
				unassigned = append(unassigned, ev.String())
			}
		}
		for _, kind := range []struct {
			when   string
			events []string
		}{{"", always}, {" (assigned)", assigned}, {" (not assigned)", unassigned}} {
			if len(kind.events) > 0 {
				out = append(out, fmt.Sprintf("//\t%s --> %s: %s%s", name(e.from), name(e.to), strings.Join(kind.events, ", "), kind.when))
			}
		}
	}
	return out
}

// TestDiagram compares the diagram in the package comment with Next.
func TestDiagram(t *testing.T) {
	raw, err := os.ReadFile("lifecycle.go")
	require.NoError(t, err)
	lines := strings.Split(string(raw), "\n")
	at := slices.Index(lines, "//\tstateDiagram-v2")
	require.GreaterOrEqual(t, at, 0, "the package comment has no diagram")
	end := at + slices.Index(lines[at:], "//")
	require.Equal(t, strings.Join(render(), "\n"), strings.Join(lines[at:end], "\n"), "replace the diagram by the expected one")
}
