package archtest_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/fast-sandbox/fast-sandbox"

// pure packages import the standard library, errdefs and each other.
var pure = []string{
	"agent/internal/usage",
	"internal/fault", "internal/identity", "internal/lifecycle", "internal/resources",
	"janitor/internal/verdict",
	"services/allocator/internal/registry", "services/allocator/internal/registry/index", "services/allocator/internal/placement", "services/allocator/internal/deletion/state",
	"services/controller/internal/pool/desired",
	"services/gc/internal/breaker", "services/gc/internal/podgc/plan", "services/gc/internal/ownergc/graph",
	"tests/bench/internal/budget", "tests/bench/internal/report",
	"tests/e2e/chaos/internal/audit", "tests/e2e/chaos/internal/plan", "tests/e2e/escape/internal/suite",
}

// components never import each other; they meet through gen.
var components = []string{"agent", "janitor", "gateway", "cli", "services/allocator", "services/controller", "services/gc"}

type pkg struct {
	ImportPath   string
	Name         string
	Imports      []string
	TestImports  []string
	XTestImports []string
	Standard     bool
}

func (p pkg) path() string { return strings.TrimPrefix(p.ImportPath, module+"/") }

func load(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Name,Imports,TestImports,XTestImports,Standard", "-tags", "integration,e2e", module+"/...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	require.NoError(t, err)
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		err := dec.Decode(&p)
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		pkgs = append(pkgs, p)
	}
	require.NotEmpty(t, pkgs)
	return pkgs
}

func within(path, root string) bool { return path == root || strings.HasPrefix(path, root+"/") }

func componentOf(path string) string {
	for _, c := range components {
		if within(path, c) {
			return c
		}
	}
	return ""
}

func TestImportRules(t *testing.T) {
	for _, p := range load(t) {
		for _, imported := range p.Imports {
			ours := strings.HasPrefix(imported, module+"/")
			target := strings.TrimPrefix(imported, module+"/")
			if within(p.path(), "gen") && ours && !within(target, "gen") {
				t.Errorf("%s imports %s: gen imports nothing of ours", p.path(), target)
			}
			if slices.Contains(pure, p.path()) && !allowedInPure(imported) {
				t.Errorf("%s imports %s: a pure package imports the standard library, errdefs and pure packages", p.path(), imported)
			}
			if from, to := componentOf(p.path()), componentOf(target); ours && to != "" && from != to && !within(p.path(), "tests") {
				t.Errorf("%s imports %s: components meet only through gen", p.path(), target)
			}
			if ours && strings.HasSuffix(target, "/app") && p.Name != "main" {
				t.Errorf("%s imports %s: only main imports app", p.path(), target)
			}
			if ours && within(target, "internal/testkit") && !within(p.path(), "internal/testkit") && !within(p.path(), "tests") &&
				!strings.Contains(p.path(), "conformance") {
				t.Errorf("%s imports %s outside a test", p.path(), target)
			}
		}
		if within(p.path(), "tests") {
			for _, imported := range slices.Concat(p.Imports, p.TestImports, p.XTestImports) {
				target, ours := strings.CutPrefix(imported, module+"/")
				if ours && !within(target, "gen") && !within(target, "internal") && !within(target, "tests") {
					t.Errorf("%s imports %s: tests see gen, internal/ and built binaries", p.path(), target)
				}
			}
		}
	}
}

func allowedInPure(imported string) bool {
	if imported == "github.com/containerd/errdefs" {
		return true
	}
	if target, ok := strings.CutPrefix(imported, module+"/"); ok {
		return slices.Contains(pure, target)
	}
	first, _, _ := strings.Cut(imported, "/")
	return !strings.Contains(first, ".") // the standard library
}
