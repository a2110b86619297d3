package archtest_test

import (
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

func TestWording(t *testing.T) {
	found := map[string][]string{}
	for _, s := range parseRepository(t) {
		if messages := wording(s); len(messages) > 0 {
			found[s.path] = messages
		}
	}
	report(t, found)
}

func TestWordingFindsDeclaredNamesAndStrings(t *testing.T) {
	require.Empty(t, wording(parse(t, "agent/good.go", []byte("package p\nvar err = errors.New(\"no agent\")\n"))))
	for _, declaration := range []string{
		"func nobodyKnows() {}", "type nobody struct{}", "var x, nobodyLeft int", "func f(nobody int) {}", "func f() { nobodyElse := 1 }",
		"var err = errors.New(\"nobody is there\")",
	} {
		require.Len(t, wording(parse(t, "agent/bad.go", []byte("package p\n"+declaration+"\n"))), 1, declaration)
	}
}

// Names that are published and older than the word list: a flag of gc, its field in the configuration, and the reason of
// canceled calls.
const (
	publishedFlag   = "rival-check"
	publishedField  = "rivalCheck"
	publishedReason = "cancelled"
)

// wordList returns the expressions of .vale/FastSandbox, in which the language of comments and documents is defined. Those
// with lookarounds, which Go's regexp does not support, are left to Vale.
var wordList = sync.OnceValues(func() ([]*regexp.Regexp, error) {
	files, err := filepath.Glob("../../.vale/FastSandbox/*.yml")
	if err != nil {
		return nil, err
	}
	var list []*regexp.Regexp
	for _, name := range files {
		raw, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		var style struct {
			IgnoreCase bool              `json:"ignorecase"`
			Tokens     []string          `json:"tokens"`
			Swap       map[string]string `json:"swap"`
		}
		if err := yaml.Unmarshal(raw, &style); err != nil {
			return nil, fmt.Errorf("reading %s: %w", name, err)
		}
		for expression := range style.Swap {
			style.Tokens = append(style.Tokens, expression)
		}
		for _, expression := range style.Tokens {
			if strings.Contains(expression, "(?=") || strings.Contains(expression, "(?<") || strings.Contains(expression, "(?!") {
				continue
			}
			if expression = `\b(?:` + expression + `)\b`; style.IgnoreCase {
				expression = "(?i)" + expression
			}
			compiled, err := regexp.Compile(expression)
			if err != nil {
				return nil, fmt.Errorf("reading %s: %w", name, err)
			}
			list = append(list, compiled)
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("no words in %v", files)
	}
	return list, nil
})

// wording finds words that the house does not use in string literals (errors, logs, help, names of tests) and in declared
// names. Vale checks comments.
func wording(s source) (found []string) {
	if within(s.path, "internal/archtest") {
		return nil
	}
	words, err := wordList()
	if err != nil {
		return []string{err.Error()}
	}
	check := func(p token.Pos, text string) {
		if strings.Contains(text, publishedFlag) || strings.Contains(text, separate(publishedField)) || strings.EqualFold(text, publishedReason) {
			return
		}
		for _, w := range words {
			if match := w.FindString(text); match != "" {
				found = append(found, fmt.Sprintf("line %d: %q in %q: .vale/FastSandbox has the word to use", s.line(p), match, text))
				return
			}
		}
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.ImportSpec:
			return false
		case *ast.BasicLit:
			if text, err := strconv.Unquote(n.Value); n.Kind == token.STRING && err == nil {
				check(n.Pos(), text)
			}
		case *ast.FuncDecl:
			check(n.Pos(), separate(n.Name.Name))
		case *ast.TypeSpec:
			check(n.Pos(), separate(n.Name.Name))
		case *ast.ValueSpec:
			checkNames(n.Names, check)
		case *ast.Field:
			checkNames(n.Names, check)
		case *ast.AssignStmt:
			for _, e := range n.Lhs {
				if name, ok := e.(*ast.Ident); ok && n.Tok == token.DEFINE {
					check(name.Pos(), separate(name.Name))
				}
			}
		}
		return true
	})
	return found
}

func checkNames(names []*ast.Ident, check func(token.Pos, string)) {
	for _, n := range names {
		check(n.Pos(), separate(n.Name))
	}
}

// separate writes a name in camel case as words: "retryUntil" becomes "retry until".
func separate(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte(' ')
		}
		if r == '_' {
			r = ' '
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
