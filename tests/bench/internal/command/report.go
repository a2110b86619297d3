package command

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
)

// Marks around the part of a document that is generated.
const (
	begin = "<!-- results: begin -->"
	end   = "<!-- results: end -->"
)

// suites returns the suites in the order of a document.
func suites() []string {
	return []string{"create", "burst", "rate", "registry", "scale", "janitor", "gc", "density"}
}

func reportCommand() *cobra.Command {
	var from, into, plots string
	cmd := &cobra.Command{Use: "report", Short: "Put saved results into a document", Args: cobra.NoArgs}
	cmd.Flags().StringVar(&from, "from", "bin/bench-results", "`directory` that suites saved to")
	cmd.Flags().StringVar(&into, "into", "docs/performance.md", "`file` with the marks between which the results go")
	cmd.Flags().StringVar(&plots, "plots", "docs/performance", "`directory` of the plots; SUITE.svg is shown if it exists")
	cmd.RunE = func(*cobra.Command, []string) error {
		results, err := gather(from, into, plots)
		if err != nil {
			return err
		}
		document, err := os.ReadFile(into)
		if err != nil {
			return fmt.Errorf("reading the document: %w", err)
		}
		if document, err = Insert(document, results); err != nil {
			return err
		}
		if err := os.WriteFile(into, document, 0o644); err != nil {
			return fmt.Errorf("writing the document: %w", err)
		}
		return nil
	}
	return cmd
}

// gather returns the saved results of all suites that have some, with their plots.
func gather(from, into, plots string) ([]byte, error) {
	var out bytes.Buffer
	for _, name := range suites() {
		raw, err := os.ReadFile(filepath.Join(from, name+".md"))
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading a result: %w", err)
		}
		out.Write(raw)
		plot := filepath.Join(plots, name+".svg")
		if _, err := os.Stat(plot); err != nil {
			continue
		}
		link, err := filepath.Rel(filepath.Dir(into), plot)
		if err != nil {
			return nil, fmt.Errorf("linking a plot: %w", err)
		}
		fmt.Fprintf(&out, "![%s](%s)\n\n", name, filepath.ToSlash(link))
	}
	if out.Len() == 0 {
		return nil, fmt.Errorf("there is no result in %s: run suites with --save first", from)
	}
	return out.Bytes(), nil
}

// Insert puts results between the marks of a document, and replaces the previous ones.
func Insert(document, results []byte) ([]byte, error) {
	i, j := bytes.Index(document, []byte(begin)), bytes.Index(document, []byte(end))
	if i < 0 || j < i {
		return nil, fmt.Errorf("the document lacks the marks %s and %s", begin, end)
	}
	return bytes.Join([][]byte{document[:i], []byte(begin), []byte("\n\n"), bytes.TrimSpace(results), []byte("\n\n"), document[j:]}, nil), nil
}
