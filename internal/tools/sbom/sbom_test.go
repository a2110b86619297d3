package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	spdxjson "github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx"
)

const created = "2026-01-02T03:04:05Z"

// made makes the documents of this test's own binary, and of an image with it, in a new directory.
func made(t *testing.T, image string) (dir, name string) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, name = t.TempDir(), filepath.Base(self)
	in := t.TempDir()
	digest := strings.Repeat("0a", 32)
	for file, content := range map[string]string{
		"i.yaml":        "name: docker.io/fast-sandbox/one:dev\nfiles: [{from: " + image + ", to: /one}]\n",
		"other.yaml":    "name: docker.io/fast-sandbox/other:demo\n",
		"digests.jsonl": `{"docker.io/fast-sandbox/one:dev": "sha256:` + digest + `"}`,
	} {
		if err := os.WriteFile(filepath.Join(in, file), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := run([]string{"-out", dir, "-version", "v1.2.3", "-created", created, "-images", in, "-digests", filepath.Join(in, "digests.jsonl"), self}); err != nil {
		t.Fatal(err)
	}
	return dir, name
}

func read(t *testing.T, path string) *spdx.Document {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	d, err := spdxjson.Read(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// self is the name of this test's binary in the description of an image.
func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(path)
}

// TestProgram: the document has the binary with its checksum, and each module once with its version.
func TestProgram(t *testing.T) {
	dir, name := made(t, self(t))
	d := read(t, filepath.Join(dir, name+".spdx.json"))
	packages := map[string]*spdx.Package{}
	for _, p := range d.Packages {
		if packages[p.PackageName] != nil {
			t.Errorf("%s is there twice", p.PackageName)
		}
		packages[p.PackageName] = p
	}
	program := packages[name]
	if program == nil || program.PackageVersion != "v1.2.3" || d.CreationInfo.Created != created || len(program.PackageChecksums) != 1 || len(program.PackageChecksums[0].Value) != 64 {
		t.Fatalf("the binary is missing, or has no checksum: %+v", program)
	}
	for _, module := range []string{"stdlib", "github.com/spdx/tools-golang", "sigs.k8s.io/yaml"} {
		p := packages[module]
		if p == nil || p.PackageVersion == "" || p.PackageExternalReferences[0].Locator != "pkg:golang/"+module+"@"+p.PackageVersion {
			t.Errorf("%s is missing, or has no version: %+v", module, p)
		}
	}
	kinds := map[string]int{}
	for _, r := range d.Relationships {
		kinds[r.Relationship]++
	}
	if kinds["DESCRIBES"] != 1 || kinds["DEPENDS_ON"] != len(d.Packages)-1 {
		t.Errorf("%d packages have the relationships %v", len(d.Packages), kinds)
	}
}

// TestImage: the document has the image with its digest, what is in it, and what that depends on.
func TestImage(t *testing.T) {
	dir, _ := made(t, self(t))
	d := read(t, filepath.Join(dir, "image-one.spdx.json"))
	kinds := map[string]int{}
	for _, r := range d.Relationships {
		kinds[r.Relationship]++
	}
	if kinds["DESCRIBES"] != 1 || kinds["CONTAINS"] != 1 || kinds["DEPENDS_ON"] != len(d.Packages)-2 {
		t.Errorf("%d packages have the relationships %v", len(d.Packages), kinds)
	}
	if _, err := os.Stat(filepath.Join(dir, "image-other.spdx.json")); err == nil {
		t.Error("an image without a digest has a document")
	}
}

// TestSameContentSameDocument: nothing of the time or the machine is in a document.
func TestSameContentSameDocument(t *testing.T) {
	first, name := made(t, self(t))
	second, _ := made(t, self(t))
	for _, file := range []string{name + ".spdx.json", "image-one.spdx.json"} {
		a, err := os.ReadFile(filepath.Join(first, file))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(second, file))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(a, b) {
			t.Errorf("%s differs", file)
		}
		if !json.Valid(a) {
			t.Errorf("%s is not JSON", file)
		}
	}
}

func TestPackageURL(t *testing.T) {
	for _, tc := range []struct{ kind, name, version, want string }{
		{"golang", "example.com/m", "v1.2.3", "pkg:golang/example.com/m@v1.2.3"},
		{"golang", "example.com/m", "v1.2.3+incompatible", "pkg:golang/example.com/m@v1.2.3%2Bincompatible"},
		{"oci", "agent", "sha256:00", "pkg:oci/agent@sha256%3A00"},
	} {
		if got := purl(tc.kind, tc.name, tc.version)[0].Locator; got != tc.want {
			t.Errorf("got %s, want %s", got, tc.want)
		}
	}
}

// TestProblems are named.
func TestProblems(t *testing.T) {
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte("no program"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no binaries":      {[]string{"-out", t.TempDir(), "-version", "v1"}, "are required"},
		"no version":       {[]string{"-out", t.TempDir(), "-created", created, text}, "are required"},
		"no time":          {[]string{"-out", t.TempDir(), "-version", "v1", text}, "reading -created"},
		"not a Go program": {[]string{"-out", t.TempDir(), "-version", "v1", "-created", created, text}, "reading " + text},
		"no such file":     {[]string{"-out", t.TempDir(), "-version", "v1", "-created", created, text + "2"}, "no such file"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := run(tc.args); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
	if _, err := imageDocument(description{Name: "a/b/c:d"}, "sha256:00", created, nil); err == nil {
		t.Error("an image without files has a document")
	}
	if _, err := imageDocument(description{Name: "a/b/c:d"}, "md5:00", created, nil); err == nil {
		t.Error("an image with another digest has a document")
	}
}
