package render_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/jaeger"
	"github.com/fast-sandbox/fast-sandbox/cli/internal/render"
)

func span(id, parent, name string, start time.Duration) jaeger.Span {
	return jaeger.Span{ID: id, Parent: parent, Name: name, Service: "s", Start: now.Add(start), Duration: time.Millisecond}
}

func TestTraceTree(t *testing.T) {
	for name, tc := range map[string]struct {
		spans []jaeger.Span
		want  []string
	}{
		"none":                 {nil, nil},
		"sorted by start":      {[]jaeger.Span{span("c", "a", "c", 2), span("b", "a", "b", 1), span("a", "", "a", 0)}, []string{"a", "├─ b", "└─ c"}},
		"deep":                 {[]jaeger.Span{span("a", "", "a", 0), span("b", "a", "b", 1), span("c", "b", "c", 2), span("d", "a", "d", 3)}, []string{"a", "├─ b", "│  └─ c", "└─ d"}},
		"missing parent":       {[]jaeger.Span{span("a", "", "a", 1), span("b", "lost", "b", 0)}, []string{"b", "a"}},
		"its own parent":       {[]jaeger.Span{span("a", "a", "a", 0)}, []string{"a"}},
		"child before parent":  {[]jaeger.Span{span("a", "", "a", time.Second), span("b", "a", "b", 0)}, []string{"a", "└─ b"}},
		"failed":               {[]jaeger.Span{{ID: "a", Name: "a", Start: now, Error: "no slot"}}, []string{"a (failed: no slot)"}},
		"a cycle has one root": {[]jaeger.Span{span("a", "b", "a", 0), span("b", "a", "b", 1)}, []string{"a", "└─ b"}},
	} {
		t.Run(name, func(t *testing.T) {
			lines := strings.Split(strings.TrimSuffix(written(t, render.Trace(tc.spans)), "\n"), "\n")
			column := strings.Index(lines[0], "SPAN")
			var got []string
			for _, line := range lines[1:] {
				got = append(got, string([]rune(line)[column:]))
			}
			require.Equal(t, tc.want, got)
		})
	}
	require.Contains(t, written(t, render.Trace([]jaeger.Span{span("a", "", "a", time.Second), span("b", "a", "b", 0)})), "\n1000 ms   1.0 ms",
		"times are counted from the earliest span")
}

// TestTraceShowsEverySpan checks that each span is shown once, whatever the parents are.
func TestTraceShowsEverySpan(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 12).Draw(t, "spans")
		var spans []jaeger.Span
		for i := range n {
			parent := rapid.IntRange(-1, 13).Draw(t, "parent")
			spans = append(spans, span(fmt.Sprint(i), fmt.Sprint(parent), fmt.Sprintf("name-%d.", i), time.Duration(rapid.IntRange(0, 5).Draw(t, "start"))))
		}
		var b strings.Builder
		if err := render.Trace(spans).Flush(&b); err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if count := strings.Count(b.String(), fmt.Sprintf("name-%d.", i)); count != 1 {
				t.Fatalf("span %d is shown %d times:\n%s", i, count, b.String())
			}
		}
	})
}
