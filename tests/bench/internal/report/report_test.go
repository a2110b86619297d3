package report_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sample() *report.Report {
	r := &report.Report{
		Suite: "create", Title: "one at a time", Commit: "abc", Began: time.Unix(1000, 0), Took: 90 * time.Second,
		Environment: report.Environment{CPU: "Z80", Cores: 2, Kernel: "6.1", Containerd: "2.4"},
		Tables:      []report.Table{{Key: "stages", Title: "Stages", Columns: []string{"stage", "p50_ms"}, Rows: [][]any{{"reserve", 0.01234}, {"claim", 2.0}}}},
		Extra:       map[string]any{"agents": map[string]int{"100": 7}},
	}
	r.Fact("concurrency", 1)
	r.Fact("cache", "image unpacked")
	r.Fact("samples", map[string]int{"slot": 1, "raw": 2})
	r.Fact("paths", []string{"slot 1", "cold 0"})
	r.Value("raw_p50_ms", 54.3219, "ms", "raw containerd")
	r.Value("slot_over_raw_p50", 0.07, "", "slot over raw")
	r.Judge([]budget.Budget{{Key: "slot_over_raw_p50", Limit: 0.15, Aim: 0.08, What: "a"}, {Key: "cold_over_raw", Limit: 1.2, What: "b"}})
	r.Sample("raw", 0, time.Unix(1002, 0), 54.3219, "ms", "")
	r.Sample("slot", 0, time.Unix(1003, 0), 4, "ms", "slot")
	r.Sample("raw", 1, time.Unix(1004, 0), 50, "ms", "")
	return r
}

func render(t *testing.T, format string) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, sample().Write(&b, format))
	return b.String()
}

func TestJSONIsFlat(t *testing.T) {
	var got map[string]any
	require.NoError(t, json.Unmarshal([]byte(render(t, report.FormatJSON)), &got))
	require.Equal(t, 54.32, got["raw_p50_ms"])
	require.Equal(t, 0.07, got["slot_over_raw_p50"])
	require.Equal(t, "abc", got["commit"])
	require.Equal(t, "1970-01-01T00:16:40Z", got["began"])
	require.Equal(t, 90.0, got["took_s"])
	require.Equal(t, map[string]any{"concurrency": 1.0, "cache": "image unpacked", "samples": map[string]any{"raw": 2.0, "slot": 1.0}, "paths": []any{"slot 1", "cold 0"}}, got["conditions"])
	require.Equal(t, []any{map[string]any{"stage": "reserve", "p50_ms": 0.01234}, map[string]any{"stage": "claim", "p50_ms": 2.0}}, got["stages"])
	require.Equal(t, map[string]any{"100": 7.0}, got["agents"])
	require.Equal(t, "Z80", got["environment"].(map[string]any)["cpu"])
	budgets := got["budgets"].([]any)
	require.Len(t, budgets, 2)
	require.Equal(t, map[string]any{"key": "slot_over_raw_p50", "what": "a", "limit": 0.15, "aim": 0.08, "measured": 0.07, "verdict": "met", "aim_met": true}, budgets[0])
	require.Equal(t, map[string]any{"key": "cold_over_raw", "what": "b", "limit": 1.2, "measured": nil, "verdict": "not measured"}, budgets[1])
}

func TestTextShowsAllOfIt(t *testing.T) {
	for _, format := range []string{report.FormatTable, report.FormatMarkdown} {
		text := render(t, format)
		for _, want := range []string{
			"abc", "Z80", "6.1", "2.4", "concurrency", "image unpacked", "raw 2, slot 1", "slot 1, cold 0", "raw_p50_ms", "54.32", "raw containerd", "reserve", "0.01234",
			"<= 0.1500 (aim 0.08000, met)", "<= 1.200", "Stages",
		} {
			require.Contains(t, text, want, format)
		}
	}
	require.Contains(t, render(t, report.FormatTable), "NOT MEASURED")
	for line := range strings.Lines(render(t, report.FormatMarkdown)) {
		require.False(t, strings.HasPrefix(line, "| `") && !strings.HasSuffix(line, " |\n"), line)
	}
	require.Error(t, sample().Write(&bytes.Buffer{}, "yaml"))
}

func TestSamples(t *testing.T) {
	r := sample()
	require.Equal(t, []float64{54.3219, 50}, r.Of("raw"))
	require.Empty(t, r.Of("pod"))
	var b bytes.Buffer
	require.NoError(t, r.WriteSamples(&b))
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	require.Len(t, lines, 3)
	require.JSONEq(t, `{"suite":"create","series":"slot","round":0,"at_s":3,"value":4,"unit":"ms","note":"slot"}`, lines[1])
}

// A budget is shown with the bounds that it has, and a JSON reader does not take a missing one for zero.
func TestBounds(t *testing.T) {
	for want, b := range map[string]budget.Budget{
		"<= 0": {Key: "x"}, ">= 4.000": {Key: "x", Least: 4, AtLeast: true}, "<= 2.000, >= 1.000": {Key: "x", Limit: 2, Least: 1},
	} {
		r := &report.Report{}
		r.Value("x", 5, "", "it")
		r.Judge([]budget.Budget{b})
		var text, raw bytes.Buffer
		require.NoError(t, r.Write(&text, report.FormatMarkdown))
		require.Contains(t, text.String(), "| "+want+" |")
		require.NoError(t, r.Write(&raw, report.FormatJSON))
		require.Equal(t, !b.AtLeast, strings.Contains(raw.String(), `"limit"`), want)
	}
}

func TestNumber(t *testing.T) {
	x, ok := sample().Number("raw_p50_ms")
	require.True(t, ok)
	require.InDelta(t, 54.3219, x, 0)
	_, ok = sample().Number("pod_p50_ms")
	require.False(t, ok)
}
