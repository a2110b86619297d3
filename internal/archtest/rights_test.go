package archtest_test

import (
	"go/ast"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit/rights"
)

// manifests are those that give rights to components. The overlay stands for each namespace with a pool.
var manifests = []string{"base", "janitor", "apikeys", "components/gc-enforce", "components/cert-manager", "overlays/cluster/pool.yaml"}

// scopes are the names of scopes in docs/security.md, as far as they differ.
var scopes = map[string]string{"namespaces of pools": "default"}

// rightRow matches a row of the table of rights: account, scope, group, resources, verbs, code.
var rightRow = regexp.MustCompile(`(?m)^\| (allocator|controller|gateway|gc|janitor) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$`)

// codeReference matches DIRECTORY.FUNCTION or DIRECTORY.TYPE.METHOD.
var codeReference = regexp.MustCompile("`([a-z0-9/]+)\\.([A-Za-z.]+)`")

// TestEveryRightIsExplained compares the manifests with the table of docs/security.md: each verb on each resource is in one row, each row
// exists, and the function that it names, too.
func TestEveryRightIsExplained(t *testing.T) {
	given := map[rights.Right]bool{}
	for _, r := range manifestRights(t) {
		given[r] = true
	}
	functions := declaredFunctions(t)
	explained := map[rights.Right]bool{}
	document, err := os.ReadFile(filepath.Join("..", "..", "docs", "security.md"))
	require.NoError(t, err)
	for _, row := range rightRow.FindAllStringSubmatch(string(document), -1) {
		for _, r := range rowRights(row) {
			if !given[r] {
				t.Errorf("docs/security.md says that %s, and no manifest says so", r)
			}
			if explained[r] {
				t.Errorf("docs/security.md says twice that %s", r)
			}
			explained[r] = true
		}
		references := codeReference.FindAllStringSubmatch(row[6], -1)
		if len(references) == 0 {
			t.Errorf("docs/security.md does not name the code that needs %s of %s", row[5], row[4])
		}
		for _, reference := range references {
			if !functions[reference[1]+"."+reference[2]] {
				t.Errorf("docs/security.md names %s.%s, which is not a function", reference[1], reference[2])
			}
		}
	}
	for r := range given {
		if !explained[r] {
			t.Errorf("docs/security.md does not say why %s", r)
		}
	}
}

func manifestRights(t *testing.T) []rights.Right {
	t.Helper()
	var objects []*unstructured.Unstructured
	for _, path := range manifests {
		found, err := rights.Objects(filepath.Join("..", "..", "deploy", path))
		require.NoError(t, err)
		objects = append(objects, found...)
	}
	out, err := rights.Of(objects)
	require.NoError(t, err)
	require.NotEmpty(t, out)
	return out
}

// rowRights returns the rights of a row.
func rowRights(row []string) []rights.Right {
	scope := row[2]
	if name, ok := scopes[scope]; ok {
		scope = name
	}
	var out []rights.Right
	for group := range strings.SplitSeq(row[3], ", ") {
		for resource := range strings.SplitSeq(strings.ReplaceAll(row[4], "`", ""), ", ") {
			for verb := range strings.SplitSeq(row[5], ", ") {
				resource, name, _ := strings.Cut(resource, " ")
				out = append(out, rights.Right{Account: row[1], Scope: scope, Group: group, Resource: resource, Name: name, Verb: verb})
			}
		}
	}
	return out
}

// declaredFunctions returns the functions and methods of the repository, without those of tests.
func declaredFunctions(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	for _, s := range parseRepository(t) {
		if s.isTest() {
			continue
		}
		dir := filepath.ToSlash(filepath.Dir(s.path))
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := f.Name.Name
			if f.Recv != nil {
				name = receiver(f.Recv.List[0].Type) + "." + name
			}
			out[dir+"."+name] = true
		}
	}
	return out
}
