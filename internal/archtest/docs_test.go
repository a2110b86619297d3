package archtest_test

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"
)

// packageRow matches the row of a package in docs/architecture.md: its first column is the package in backticks.
var packageRow = regexp.MustCompile("(?m)^\\| `([^`]+)` \\|")

// TestArchitectureNamesEveryPackage keeps the tables of docs/architecture.md complete, without duplicates and without packages
// that no longer exist. Generated packages have one row together, and PURE packages are marked.
func TestArchitectureNamesEveryPackage(t *testing.T) {
	document, err := os.ReadFile(filepath.Join("..", "..", "docs", "architecture.md"))
	require.NoError(t, err)
	documented := map[string]bool{"gen": false}
	for _, row := range packageRow.FindAllStringSubmatch(string(document), -1) {
		if documented[row[1]] {
			t.Errorf("docs/architecture.md names %s twice", row[1])
		}
		documented[row[1]] = true
	}
	existing := map[string]bool{"gen": true}
	for _, s := range parseRepository(t) {
		existing[filepath.ToSlash(filepath.Dir(s.path))] = true
	}
	for p := range existing {
		if !documented[p] {
			t.Errorf("docs/architecture.md does not name the package %s", p)
		}
	}
	for p := range documented {
		if !existing[p] {
			t.Errorf("docs/architecture.md names %s, which is not a package", p)
		}
	}
	marked := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| PURE: ").FindAllStringSubmatch(string(document), -1)
	var names []string
	for _, m := range marked {
		names = append(names, m[1])
	}
	require.ElementsMatch(t, pure, names, "pure packages are marked as PURE")
}
