package archtest_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const (
	maxFileLines     = 400
	maxFunctionLines = 60
	maxMethods       = 40
)

// source is one parsed Go file.
type source struct {
	path string // relative to the repository
	file *ast.File
	fset *token.FileSet
}

func (s source) line(p token.Pos) int { return s.fset.Position(p).Line }

func (s source) isTest() bool { return strings.HasSuffix(s.path, "_test.go") }

// isTooling reports whether the file belongs to code that runs in no component.
func (s source) isTooling() bool {
	return s.isTest() || within(s.path, "internal/testkit") || within(s.path, "tests")
}

// rule is a property of one file. find returns a message for each violation, without the file's name.
type rule struct {
	name string
	find func(s source) []string
}

var rules = []rule{
	{"file length", fileLength},
	{"function length", functionLength},
	{"init function", initFunctions},
	{"environment", environmentReads},
	{"sleep", sleeps},
	{"telemetry key", telemetryKeys},
	{"command line", commandLines},
}

func TestSources(t *testing.T) {
	all := parseRepository(t)
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			found := map[string][]string{}
			for _, s := range all {
				if messages := r.find(s); len(messages) > 0 {
					found[s.path] = messages
				}
			}
			report(t, found)
		})
	}
	t.Run("method count", func(t *testing.T) { report(t, methodCount(all)) })
}

// report fails the test for each finding.
func report(t *testing.T, found map[string][]string) {
	t.Helper()
	for subject, messages := range found {
		for _, m := range messages {
			t.Errorf("%s: %s", subject, m)
		}
	}
}

func parseRepository(t *testing.T) []source {
	t.Helper()
	root, err := filepath.Abs("../..")
	require.NoError(t, err)
	var all []source
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			if rel == "gen" || rel == "bin" || (strings.HasPrefix(d.Name(), ".") && rel != ".") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(rel, ".go") || strings.HasPrefix(d.Name(), "zz_generated") {
			return nil
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		all = append(all, parse(t, rel, raw))
		return nil
	}))
	require.NotEmpty(t, all)
	return all
}

func parse(t *testing.T, path string, raw []byte) source {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, raw, parser.ParseComments|parser.SkipObjectResolution)
	require.NoError(t, err)
	return source{path: path, file: file, fset: fset}
}

func fileLength(s source) []string {
	lines := s.fset.File(s.file.FileStart).LineCount() - 1
	if s.isTest() || lines <= maxFileLines {
		return nil
	}
	return []string{fmt.Sprintf("%d lines, at most %d: split the file", lines, maxFileLines)}
}

// functionLength counts as golangci-lint's funlen does: the lines of the body without those that hold only a comment.
func functionLength(s source) (found []string) {
	if s.isTooling() {
		return nil
	}
	for _, d := range s.file.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		lines := s.line(f.End()) - s.line(f.Pos()) - 1
		for _, group := range s.file.Comments {
			if group.Pos() > f.Body.Lbrace && group.End() < f.Body.Rbrace {
				lines -= s.line(group.End()) - s.line(group.Pos()) + 1
			}
		}
		if lines > maxFunctionLines {
			found = append(found, fmt.Sprintf("line %d: %s has %d lines, at most %d", s.line(f.Pos()), f.Name.Name, lines, maxFunctionLines))
		}
	}
	return found
}

func initFunctions(s source) (found []string) {
	for _, d := range s.file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == "init" {
			found = append(found, fmt.Sprintf("line %d: init function", s.line(f.Pos())))
		}
	}
	return found
}

func environmentReads(s source) []string {
	if s.isTooling() || within(s.path, "internal/config") || within(s.path, "deploy/local") {
		return nil
	}
	return calls(s, "only internal/config reads the environment", "os.Getenv", "os.LookupEnv", "os.Environ")
}

func sleeps(s source) []string {
	if within(s.path, "tests/bench") {
		return nil
	}
	return calls(s, "wait for a condition, or use a clock", "time.Sleep")
}

// calls finds calls of package functions, written as "package.Function".
func calls(s source, message string, functions ...string) (found []string) {
	ast.Inspect(s.file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		x, name := selector(call)
		for _, f := range functions {
			if x+"."+name == f {
				found = append(found, fmt.Sprintf("line %d: %s: %s", s.line(call.Pos()), f, message))
			}
		}
		return true
	})
	return found
}

// selector returns x and f of a call x.f(); x is empty unless it is an identifier.
func selector(call *ast.CallExpr) (x, f string) {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return "", ""
	}
	if ident, ok := sel.X.(*ast.Ident); ok {
		x = ident.Name
	}
	return x, sel.Sel.Name
}

// telemetryKeys finds span attributes and log keys that are string literals: they are constants of internal/obs, so that one
// thing has one name in all components.
func telemetryKeys(s source) (found []string) {
	if s.isTooling() || within(s.path, "internal/obs") || within(s.path, "deploy/local") {
		return nil
	}
	ast.Inspect(s.file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		for _, key := range telemetryKeysOf(call) {
			if literal, ok := key.(*ast.BasicLit); ok && literal.Kind == token.STRING {
				found = append(found, fmt.Sprintf("line %d: the key %s is a constant of internal/obs", s.line(literal.Pos()), literal.Value))
			}
		}
		return true
	})
	return found
}

// telemetryKeysOf returns the arguments of a call that are keys, judged by the call's shape: attribute.String(key, value),
// and logr's Info(message, key, value ...), Error(err, message, key, value ...) and WithValues(key, value ...).
func telemetryKeysOf(call *ast.CallExpr) (keys []ast.Expr) {
	x, name := selector(call)
	if x == "attribute" && len(call.Args) == 2 {
		return call.Args[:1]
	}
	first := map[string]int{"Info": 1, "Error": 2, "WithValues": 0}
	begin, ok := first[name]
	if !ok || (len(call.Args)-begin)%2 != 0 || x == "http" {
		return nil
	}
	for i := begin; i < len(call.Args); i += 2 {
		keys = append(keys, call.Args[i])
	}
	return keys
}

// commandLines finds files that read the command lines of processes without the program that the kernel executes: what a process calls
// itself is its own word. The probe of sandboxes prints them, and attacks read what they find in a sandbox.
func commandLines(s source) (found []string) {
	var at []token.Pos
	program := false
	ast.Inspect(s.file, func(n ast.Node) bool {
		if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
			program = program || literal.Value == `"exe"`
			if literal.Value == `"cmdline"` || strings.HasSuffix(literal.Value, `/cmdline"`) {
				at = append(at, literal.Pos())
			}
		}
		return true
	})
	if program || within(s.path, "agent/internal/slot/probe") || within(s.path, "tests/e2e/escape/internal/attack") {
		return nil
	}
	for _, p := range at {
		found = append(found, fmt.Sprintf("line %d: reads a command line: identify a process by /proc/PID/exe first", s.line(p)))
	}
	return found
}

// methodCount finds types with too many methods, as "directory.Type".
func methodCount(all []source) map[string][]string {
	counts := map[string]int{}
	for _, s := range all {
		if s.isTest() {
			continue
		}
		for _, d := range s.file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv != nil {
				counts[filepath.ToSlash(filepath.Dir(s.path))+"."+receiver(f.Recv.List[0].Type)]++
			}
		}
	}
	found := map[string][]string{}
	for name, n := range counts {
		if n > maxMethods {
			found[name] = []string{fmt.Sprintf("%d methods, at most %d: split the type", n, maxMethods)}
		}
	}
	return found
}

func receiver(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return receiver(e.X)
	case *ast.IndexExpr:
		return receiver(e.X)
	case *ast.IndexListExpr:
		return receiver(e.X)
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// TestRulesFindViolations shows each rule a file that violates it and one that does not.
func TestRulesFindViolations(t *testing.T) {
	long := strings.Repeat("\n", maxFileLines+1)
	body := strings.Repeat("\tx()\n", maxFunctionLines+1)
	comments := strings.Repeat("\t// why\n", maxFunctionLines+1)
	tests := map[string]struct{ good, bad string }{
		"file length":     {"package p\n", "package p\n" + long},
		"function length": {"package p\nfunc f() {\n" + comments + "\tx()\n}\n", "package p\nfunc f() {\n" + body + "}\n"},
		"init function":   {"package p\nfunc start() {}\n", "package p\nfunc init() {}\n"},
		"environment":     {"package p\nvar x = os.Args\n", "package p\nvar x = os.Getenv(\"A\")\n"},
		"sleep":           {"package p\nfunc f() { clock.Sleep(1) }\n", "package p\nfunc f() { time.Sleep(1) }\n"},
		"telemetry key": {
			"package p\nfunc f() { log.Info(\"m\", obs.KeyPod, p); log.Error(err, \"m\"); span.Set(attribute.Int(obs.AttrAttempt, 1)) }\n",
			"package p\nfunc f() { log.Error(err, \"m\", \"pod\", p) }\n",
		},
		"command line": {
			"package p\nfunc f() { read(\"exe\"); read(\"cmdline\") }\n",
			"package p\nfunc f() { read(\"/proc/1/cmdline\") }\n",
		},
	}
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			test, ok := tests[r.name]
			require.True(t, ok, "the rule has no test")
			require.Empty(t, r.find(parse(t, "agent/good.go", []byte(test.good))))
			require.NotEmpty(t, r.find(parse(t, "agent/bad.go", []byte(test.bad))))
		})
	}
	t.Run("method count", func(t *testing.T) {
		methods := "package p\n" + strings.Repeat("func (t *T[K]) m() {}\n", maxMethods)
		require.Empty(t, methodCount([]source{parse(t, "agent/good.go", []byte(methods))}))
		over := []source{parse(t, "agent/bad.go", []byte(methods)), parse(t, "agent/more.go", []byte("package p\nfunc (T[K]) more() {}\n"))}
		require.Contains(t, methodCount(over), "agent.T")
	})
	t.Run("telemetry key of each call", func(t *testing.T) {
		for _, call := range []string{`log.Info("m", "k", v)`, `log.V(2).Info("m", obs.KeyPod, v, "k", v)`, `log.WithValues("k", v)`, `attribute.String("k", v)`} {
			require.Len(t, telemetryKeys(parse(t, "agent/bad.go", []byte("package p\nvar x = "+call+"\n"))), 1, call)
		}
	})
}
