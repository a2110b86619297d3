package draw_test

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/draw"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestSVG(t *testing.T) {
	tests := []struct {
		name   string
		figure report.Figure
		texts  []string
		fails  bool
	}{
		{
			"lines", report.Figure{Title: "Times", X: "milliseconds", Y: "share", LogX: true, Lines: []report.Line{
				{Name: "raw", Points: [][2]float64{{1, 0}, {10, 0.5}, {100, 1}}}, {Name: "slot", Points: [][2]float64{{0, 0}, {2, 1}}},
			}}, []string{"Times", "milliseconds", "share", "raw", "slot"}, false,
		},
		{"one point on two logarithmic axes", report.Figure{LogX: true, LogY: true, Lines: []report.Line{{Name: "only", Points: [][2]float64{{5, 7}}}}}, []string{"only"}, false},
		{"bars", report.Figure{Title: "Memory", Groups: []string{"slot", "cold"}, Bars: []report.Bar{
			{Name: "init", Values: []float64{1, 2}}, {Name: "shim", Values: []float64{3, 4}},
		}}, []string{"Memory", "slot", "cold", "init", "shim"}, false},
		{"nothing", report.Figure{}, nil, true},
		{"nothing that is above zero", report.Figure{LogY: true, Lines: []report.Line{{Name: "zero", Points: [][2]float64{{1, 0}}}}}, nil, true},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			svg, err := draw.Bytes(test.figure)
			if test.fails {
				require.Error(t, err)
				return
			}
			require.NoError(t, err)
			found := textsOf(t, string(svg))
			for _, text := range test.texts {
				require.Contains(t, found, text)
			}
		})
	}
}

// textsOf are all texts of a document that must be well-formed.
func textsOf(t *testing.T, svg string) []string {
	t.Helper()
	var out []string
	for decoder := xml.NewDecoder(strings.NewReader(svg)); ; {
		token, err := decoder.Token()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		if text, ok := token.(xml.CharData); ok {
			out = append(out, strings.TrimSpace(string(text)))
		}
	}
}
