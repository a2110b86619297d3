// Package render formats messages of the API for people (tables) and for programs (JSON, YAML, names). It does no I/O except
// to the writers of its callers, and never reads a clock. Its functions are safe for concurrent use; a Table is not.
package render

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"
)

// None is the cell of a missing or unknown value.
const None = "<none>"

// Table is a table that can grow: later rows have the column widths of the first ones.
type Table struct {
	header []string
	rows   [][]string
	widths []int
	headed bool
}

// NewTable returns an empty table with these columns.
func NewTable(header ...string) *Table {
	return &Table{header: header, widths: make([]int, len(header))}
}

// Add adds a row. An empty cell is shown as None.
func (t *Table) Add(cells ...string) {
	for i := range cells {
		if cells[i] == "" {
			cells[i] = None
		}
	}
	t.rows = append(t.rows, cells)
}

// Flush writes the rows since the last Flush, and the header before the first row.
func (t *Table) Flush(w io.Writer) error {
	rows := t.rows
	if !t.headed && len(t.header) > 0 {
		rows = append([][]string{t.header}, rows...)
	}
	t.headed, t.rows = true, nil
	for _, row := range rows {
		for i, cell := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	var b strings.Builder
	for _, row := range rows {
		for i, cell := range row {
			b.WriteString(cell)
			if i < len(row)-1 {
				b.WriteString(strings.Repeat(" ", t.widths[i]-utf8.RuneCountInString(cell)+3))
			}
		}
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// JSON returns a message as protojson, indented by two spaces, with a final newline.
func JSON(m proto.Message) ([]byte, error) {
	raw, err := Line(m)
	if err != nil {
		return nil, err
	}
	return indent(raw)
}

// Line returns a message as protojson on one line, without a newline.
func Line(m proto.Message) ([]byte, error) {
	raw, err := protojson.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	var b bytes.Buffer
	if err := json.Compact(&b, raw); err != nil { // protojson adds spaces at random
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	return b.Bytes(), nil
}

// List returns {"<key>":[...]}, indented. An empty list is [].
func List[M proto.Message](key string, items []M) ([]byte, error) {
	lines := make([]json.RawMessage, len(items))
	for i, m := range items {
		line, err := Line(m)
		if err != nil {
			return nil, err
		}
		lines[i] = line
	}
	raw, err := json.Marshal(map[string][]json.RawMessage{key: lines})
	if err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	return indent(raw)
}

func indent(raw []byte) ([]byte, error) {
	var b bytes.Buffer
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		return nil, fmt.Errorf("writing JSON: %w", err)
	}
	b.WriteByte('\n')
	return b.Bytes(), nil
}

// YAML converts JSON to YAML.
func YAML(raw []byte) ([]byte, error) {
	out, err := yaml.JSONToYAML(raw)
	if err != nil {
		return nil, fmt.Errorf("writing YAML: %w", err)
	}
	return out, nil
}

// Age returns the time since t as kubectl shows it.
func Age(t time.Time, now time.Time) string {
	if t.IsZero() || t.Unix() == 0 {
		return "<unknown>"
	}
	return duration.HumanDuration(max(0, now.Sub(t)))
}

// Millis returns a duration in milliseconds, rounded, without the unit.
func Millis(d time.Duration) string {
	ms := float64(d) / float64(time.Millisecond)
	switch {
	case ms >= 100:
		return fmt.Sprintf("%.0f", ms)
	case ms >= 1:
		return fmt.Sprintf("%.1f", ms)
	default:
		return fmt.Sprintf("%.2f", ms)
	}
}
