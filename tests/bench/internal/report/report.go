// Package report is what a suite says: values by their keys, tables, verdicts on budgets, and the circumstances without
// which a number means nothing. It is pure. It renders itself as a table for people, JSON for machines and markdown for
// docs/performance.md. A Report is filled by one goroutine.
package report

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/budget"
)

// Report is one suite's.
type Report struct {
	// Suite is its name, Title what it measures in a line.
	Suite, Title string
	// Commit is that of the sources; it ends in `-dirty` if they were changed since.
	Commit string
	// Began is when the run began; Took how long it lasted.
	Began time.Time
	Took  time.Duration
	// Environment is the machine.
	Environment Environment
	// Conditions are sample counts, concurrency, cache state and other circumstances of the numbers.
	Conditions []Fact
	// Values are what was measured.
	Values []Value
	// Tables are what was measured in more detail.
	Tables []Table
	// Extra are further members of the JSON.
	Extra map[string]any
	// Budgets are the verdicts.
	Budgets []budget.Verdict
	// Samples are all that was measured; they go to a file on request.
	Samples []Sample
	// Figure is the suite's plot.
	Figure Figure
}

// Fact is one condition.
type Fact struct {
	Key   string
	Value any
}

// Value is one number.
type Value struct {
	Key    string
	Number float64
	Unit   string
	What   string
}

// Table is a table; in JSON an array of objects with the columns as keys.
type Table struct {
	Key, Title string
	Columns    []string
	Rows       [][]any
}

// Sample is one measurement.
type Sample struct {
	Suite  string  `json:"suite"`
	Series string  `json:"series"`
	Round  int     `json:"round"`
	At     float64 `json:"at_s"` // since the run began
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Note   string  `json:"note,omitempty"`
}

// Figure is a plot: lines, or bars in groups.
type Figure struct {
	Title, X, Y string
	// LogX and LogY draw an axis in powers of ten.
	LogX, LogY bool
	Lines      []Line
	// Bars are stacked, one for each group.
	Groups []string
	Bars   []Bar
}

// Line is one series of points.
type Line struct {
	Name   string
	Points [][2]float64
}

// Bar is one layer of bars: a value for each group.
type Bar struct {
	Name   string
	Values []float64
}

// Fact adds a condition.
func (r *Report) Fact(key string, value any) { r.Conditions = append(r.Conditions, Fact{key, value}) }

// Value adds a number.
func (r *Report) Value(key string, number float64, unit, what string) {
	r.Values = append(r.Values, Value{key, number, unit, what})
}

// Sample adds a measurement that was taken at a moment.
func (r *Report) Sample(series string, round int, at time.Time, value float64, unit, note string) {
	r.Samples = append(r.Samples, Sample{r.Suite, series, round, at.Sub(r.Began).Seconds(), value, unit, note})
}

// Of returns the samples of a series, in the order in which they were taken.
func (r *Report) Of(series string) []float64 {
	var out []float64
	for _, s := range r.Samples {
		if s.Series == series {
			out = append(out, s.Value)
		}
	}
	return out
}

// Number is the value of a key, and whether there is one.
func (r *Report) Number(key string) (float64, bool) {
	for _, v := range r.Values {
		if v.Key == key {
			return v.Number, true
		}
	}
	return 0, false
}

// Judge sets the verdicts.
func (r *Report) Judge(budgets []budget.Budget) {
	values := map[string]float64{}
	for _, v := range r.Values {
		values[v.Key] = v.Number
	}
	r.Budgets = budget.Judge(budgets, values)
}

// MarshalJSON is one flat object: the values by their keys, beside suite, commit, environment, conditions, budgets and one
// member for each table.
func (r *Report) MarshalJSON() ([]byte, error) {
	conditions := object{}
	for _, f := range r.Conditions {
		conditions.set(f.Key, f.Value)
	}
	out := object{}
	out.set("suite", r.Suite)
	out.set("commit", r.Commit)
	out.set("began", r.Began.UTC().Format(time.RFC3339))
	out.set("took_s", r.Took.Round(time.Millisecond).Seconds())
	out.set("environment", r.Environment)
	out.set("conditions", conditions)
	for _, v := range r.Values {
		out.set(v.Key, json.Number(number(v.Number)))
	}
	for _, t := range r.Tables {
		rows := make([]object, 0, len(t.Rows))
		for _, row := range t.Rows {
			o := object{}
			for i, cell := range row {
				o.set(t.Columns[i], cell)
			}
			rows = append(rows, o)
		}
		out.set(t.Key, rows)
	}
	for k, v := range r.Extra {
		out.set(k, v)
	}
	out.set("budgets", r.Budgets)
	return json.Marshal(out)
}

// object is a JSON object in the order in which it was filled.
type object struct {
	keys   []string
	values []any
}

func (o *object) set(key string, value any) {
	o.keys, o.values = append(o.keys, key), append(o.values, value)
}

// MarshalJSON implements json.Marshaler.
func (o object) MarshalJSON() ([]byte, error) {
	var b strings.Builder
	b.WriteByte('{')
	for i, k := range o.keys {
		key, err := json.Marshal(k)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(o.values[i])
		if err != nil {
			return nil, fmt.Errorf("encoding %s: %w", k, err)
		}
		if i > 0 {
			b.WriteByte(',')
		}
		b.Write(key)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return []byte(b.String()), nil
}

// Distribution is the line of a cumulative distribution: for each sample, the share of all that do not exceed it.
func Distribution(name string, samples []float64) Line {
	sorted := slices.Clone(samples)
	slices.Sort(sorted)
	l := Line{Name: fmt.Sprintf("%s (%d)", name, len(sorted))}
	for i, x := range sorted {
		l.Points = append(l.Points, [2]float64{x, float64(i+1) / float64(len(sorted))})
	}
	return l
}
