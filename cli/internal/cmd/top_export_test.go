package cmd

import "io"

// Screen returns what shows texts on a screen with a number of rows; nil for no terminal.
func Screen(out io.Writer, rows func() int) func(string) error {
	s := &screen{out: out, rows: rows}
	return s.show
}
