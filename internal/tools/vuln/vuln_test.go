package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// called is a vulnerability of the standard library in a function that the module of the test calls; unused is one in a function that it
// does not call.
const (
	called = "GO-2026-9001"
	unused = "GO-2026-9002"
)

func write(t *testing.T, path, content string) string {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// database makes a small database and returns its URL.
func database(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	const modified = `"modified":"2026-01-01T00:00:00Z"`
	write(t, filepath.Join(dir, "index", "db.json"), `{`+modified+`}`)
	write(t, filepath.Join(dir, "index", "modules.json"), `[{"path":"stdlib","vulns":[{"id":"`+called+`",`+modified+`},{"id":"`+unused+`",`+modified+`}]}]`)
	for id, symbol := range map[string]string{called: "Parse", unused: "ParseQuery"} {
		write(t, filepath.Join(dir, "ID", id+".json"), `{"schema_version":"1.3.1","id":"`+id+`",`+modified+`,"summary":"`+symbol+` of the test",
			"affected":[{"package":{"name":"stdlib","ecosystem":"Go"},"ranges":[{"type":"SEMVER","events":[{"introduced":"0"}]}],
			"ecosystem_specific":{"imports":[{"path":"net/url","symbols":["`+symbol+`"]}]}}]}`)
	}
	return "file://" + dir
}

// module makes a module that calls one of the vulnerable functions.
func module(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "go.mod"), "module example.com/program\n\ngo 1.26\n")
	write(t, filepath.Join(dir, "main.go"), "package main\n\nimport \"net/url\"\n\nfunc main() { _, _ = url.Parse(\"x\") }\n")
	return dir
}

func exceptions(t *testing.T, content string) string {
	t.Helper()
	return write(t, filepath.Join(t.TempDir(), "exceptions.yaml"), content)
}

// TestRun runs govulncheck against the small database.
func TestRun(t *testing.T) {
	db, dir := database(t), module(t)
	for name, tc := range map[string]struct {
		exceptions, db string
		want           string // in the error; empty for none
	}{
		"a call is a failure":              {"exceptions: []", db, called + " is called by example.com/program.main"},
		"a reviewed call is none":          {"exceptions: [{id: " + called + ", reason: it does no harm, until: 2999-12-31}]", db, ""},
		"an exception that has ended":      {"exceptions: [{id: " + called + ", reason: it does no harm, until: 2026-01-01}]", db, "has ended on 2026-01-01"},
		"an exception that is not needed":  {"exceptions: [{id: " + called + ", reason: r, until: 2999-12-31}, {id: " + unused + ", reason: r, until: 2999-12-31}]", db, unused + " is no longer needed"},
		"a database that is not there":     {"exceptions: []", "file://" + t.TempDir(), "nothing was checked"},
		"a database that does not answer":  {"exceptions: []", "http://127.0.0.1:1", "nothing was checked"},
		"an exception without an end":      {"exceptions: [{id: " + called + ", reason: r}]", db, "a day (YYYY-MM-DD)"},
		"an exception with unknown fields": {"exceptions: [{name: " + called + "}]", db, "unknown field"},
	} {
		t.Run(name, func(t *testing.T) {
			err := run(t.Context(), []string{"-db", tc.db, "-exceptions", exceptions(t, tc.exceptions), dir})
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Fatalf("got %v, want %q", err, tc.want)
			}
		})
	}
}

// TestExceptionsOfTheRepository: the committed file is valid.
func TestExceptionsOfTheRepository(t *testing.T) {
	all, err := readExceptions(filepath.Join("..", "..", "..", ".ci", "vulnerabilities.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		if e.ended(time.Now()) {
			t.Logf("the exception of %s has ended", e.ID)
		}
	}
}
