package archtest_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
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

var (
	// testName matches the name of a test, a fuzz target or a benchmark.
	testName = regexp.MustCompile(`\b(?:Test|Fuzz|Benchmark)[A-Z]\w*`)
	// testsOfPackage matches the end of a package's path in backticks, and the names of its tests.
	testsOfPackage = regexp.MustCompile("`([a-z0-9/.-]+)`: ((?:(?:Test|Fuzz|Benchmark)[A-Z]\\w*(?:, )?)+)")
)

// TestDocumentedTestsExist: a guarantee is worth as much as the test that a document names for it.
func TestDocumentedTestsExist(t *testing.T) {
	existing := testsByName(t)
	var documents []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/decisions/*.md", "deploy/*.md"} {
		found, err := filepath.Glob(filepath.Join("..", "..", filepath.FromSlash(pattern)))
		require.NoError(t, err)
		documents = append(documents, found...)
	}
	require.Greater(t, len(documents), 30)
	for _, path := range documents {
		raw, err := os.ReadFile(path)
		require.NoError(t, err)
		for _, problem := range missingTests(string(raw), existing) {
			t.Errorf("%s: %s", filepath.ToSlash(strings.TrimPrefix(path, filepath.Join("..", "..")+string(filepath.Separator))), problem)
		}
	}
}

// missingTests returns the tests that a document names and that do not exist, or not in the package that it names.
func missingTests(document string, existing map[string][]string) (problems []string) {
	for _, name := range testName.FindAllString(document, -1) {
		if len(existing[name]) == 0 {
			problems = append(problems, "there is no "+name)
		}
	}
	for _, row := range testsOfPackage.FindAllStringSubmatch(document, -1) {
		for _, name := range testName.FindAllString(row[2], -1) {
			there := slices.ContainsFunc(existing[name], func(dir string) bool { return strings.HasSuffix("/"+dir, "/"+row[1]) })
			if len(existing[name]) > 0 && !there {
				problems = append(problems, "there is no "+name+" in a package "+row[1])
			}
		}
	}
	return problems
}

// testsByName returns the directories that have a test of each name.
func testsByName(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for _, s := range parseRepository(t) {
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && s.isTest() && f.Recv == nil && testName.MatchString(f.Name.Name) {
				out[f.Name.Name] = append(out[f.Name.Name], filepath.ToSlash(filepath.Dir(s.path)))
			}
		}
	}
	return out
}

func TestMissingTestsAreFound(t *testing.T) {
	existing := map[string][]string{"TestA": {"services/allocator/internal/store"}, "FuzzB": {"internal/ctrd"}}
	for document, want := range map[string][]string{
		"TestA and (`FuzzB`)":                            nil,
		"| x | `store`: TestA; `internal/ctrd`: FuzzB |": nil,
		"no test, Testing, TestNone":                     {"there is no TestNone"},
		"| x | `internal/ctrd`: TestA |":                 {"there is no TestA in a package internal/ctrd"},
		"`tore`: TestA":                                  {"there is no TestA in a package tore"},
		"`store`: TestA, TestB":                          {"there is no TestB"},
	} {
		require.Equal(t, want, missingTests(document, existing), document)
	}
}
