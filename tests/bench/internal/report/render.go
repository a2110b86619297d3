package report

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
)

// Formats of Write.
const (
	FormatTable    = "table"
	FormatJSON     = "json"
	FormatMarkdown = "markdown"
)

// CheckFormat returns an error if Write would not know the format.
func CheckFormat(format string) error {
	switch format {
	case FormatTable, FormatJSON, FormatMarkdown:
		return nil
	}
	return fmt.Errorf("the format is %q, want %s, %s or %s", format, FormatTable, FormatJSON, FormatMarkdown)
}

// Write renders the report in a format.
func (r *Report) Write(w io.Writer, format string) error {
	switch format {
	case FormatTable:
		return r.table(w)
	case FormatJSON:
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(r)
	case FormatMarkdown:
		return r.markdown(w)
	}
	return CheckFormat(format)
}

// WriteSamples writes all samples as JSON, one a line.
func (r *Report) WriteSamples(w io.Writer) error {
	encoder := json.NewEncoder(w)
	for _, s := range r.Samples {
		if err := encoder.Encode(s); err != nil {
			return fmt.Errorf("writing samples: %w", err)
		}
	}
	return nil
}

// number has about four digits that count, and no more.
func number(x float64) string {
	if x == 0 || math.IsNaN(x) || math.IsInf(x, 0) {
		return "0"
	}
	digits := 3 - int(math.Floor(math.Log10(math.Abs(x))))
	return strconv.FormatFloat(x, 'f', min(max(digits, 0), 9), 64)
}

// cell is how a table shows a value.
func cell(v any) string {
	switch x := v.(type) {
	case float64:
		return number(x)
	case nil:
		return ""
	case []string:
		return strings.Join(x, ", ")
	case map[string]int:
		var parts []string
		for _, k := range slices.Sorted(maps.Keys(x)) {
			parts = append(parts, fmt.Sprintf("%s %d", k, x[k]))
		}
		return strings.Join(parts, ", ")
	}
	return fmt.Sprint(v)
}

func (r *Report) table(w io.Writer) error {
	fmt.Fprintf(w, "%s: %s\n", r.Suite, r.Title)
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintf(t, "  commit\t%s\n  began\t%s, took %s\n", r.Commit, r.Began.UTC().Format(time.RFC3339), r.Took.Round(time.Second))
	for _, f := range r.Environment.Facts() {
		fmt.Fprintf(t, "  %s\t%s\n", f[0], f[1])
	}
	for _, f := range r.Conditions {
		fmt.Fprintf(t, "  %s\t%s\n", f.Key, cell(f.Value))
	}
	fmt.Fprintln(t)
	for _, v := range r.Values {
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\n", v.Key, number(v.Number), v.Unit, v.What)
	}
	for _, x := range r.Tables {
		fmt.Fprintf(t, "\n%s\n  %s\n", x.Title, strings.Join(x.Columns, "\t"))
		for _, row := range x.Rows {
			fmt.Fprintf(t, "  %s\n", strings.Join(cells(row), "\t"))
		}
	}
	fmt.Fprintf(t, "\nbudgets\n")
	for _, b := range r.Budgets {
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\n", b.Key, measured(b), bound(b), strings.ToUpper(string(b.Outcome)))
	}
	return t.Flush()
}

func (r *Report) markdown(w io.Writer) error {
	fmt.Fprintf(w, "### %s: %s\n\n", r.Suite, r.Title)
	var facts []string
	for _, f := range r.Environment.Facts() {
		facts = append(facts, f[0]+" "+f[1])
	}
	fmt.Fprintf(w, "Commit %s, %s, %s. %s.\n\n", r.Commit, r.Began.UTC().Format("2006-01-02 15:04"), r.Took.Round(time.Second), strings.Join(facts, "; "))
	for _, f := range r.Conditions {
		fmt.Fprintf(w, "- %s: %s\n", f.Key, cell(f.Value))
	}
	table := func(columns []string, rows [][]string) {
		fmt.Fprintf(w, "\n| %s |\n|%s\n", strings.Join(columns, " | "), strings.Repeat("---|", len(columns)))
		for _, row := range rows {
			fmt.Fprintf(w, "| %s |\n", strings.Join(row, " | "))
		}
	}
	var rows [][]string
	for _, b := range r.Budgets {
		rows = append(rows, []string{"`" + b.Key + "`", b.What, measured(b), bound(b), string(b.Outcome)})
	}
	table([]string{"budget", "what", "measured", "limit", "verdict"}, rows)
	rows = nil
	for _, v := range r.Values {
		rows = append(rows, []string{"`" + v.Key + "`", number(v.Number), v.Unit, v.What})
	}
	table([]string{"key", "value", "unit", "what"}, rows)
	for _, x := range r.Tables {
		fmt.Fprintf(w, "\n%s:\n", x.Title)
		rows = nil
		for _, row := range x.Rows {
			rows = append(rows, cells(row))
		}
		table(x.Columns, rows)
	}
	fmt.Fprintln(w)
	return nil
}

func cells(row []any) []string {
	out := make([]string, len(row))
	for i, c := range row {
		out[i] = cell(c)
	}
	return out
}

func measured(v budget.Verdict) string {
	if v.Measured == nil {
		return "-"
	}
	return number(*v.Measured)
}

func bound(v budget.Verdict) string {
	var bounds []string
	if v.Limit != nil {
		bounds = append(bounds, "<= "+number(*v.Limit))
	}
	if v.Least != 0 {
		bounds = append(bounds, ">= "+number(v.Least))
	}
	s := strings.Join(bounds, ", ")
	if v.Aim != 0 {
		s += " (aim " + number(v.Aim)
		if v.AimMet {
			s += ", met"
		}
		s += ")"
	}
	return s
}
