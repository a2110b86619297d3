package image_test

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/image"
)

func TestParse(t *testing.T) {
	d, err := image.Parse([]byte("name: docker.io/x/y:z\nuser: '1'\nfiles: [{from: a, to: /a}]\n"))
	require.NoError(t, err)
	require.Equal(t, image.Description{Name: "docker.io/x/y:z", User: "1", Files: []image.File{{From: "a", To: "/a"}}}, d)

	_, err = image.Parse([]byte("name: docker.io/x/y:z\nentrypont: [a]\n"))
	require.ErrorContains(t, err, "entrypont")

	_, err = image.Parse([]byte("name: y\nfiles: [{to: a/..}]\ndirectories: [{path: /t, mode: '9'}]\n"))
	for _, problem := range []string{"name:", "files.from: empty", `files.to: "a/.."`, "directories.mode"} {
		require.ErrorContains(t, err, problem)
	}
}

// The descriptions that the project ships are right, and no two have the same name.
func TestShippedDescriptions(t *testing.T) {
	all, err := image.Load(filepath.Join("..", "..", "..", "images"))
	require.NoError(t, err)
	names := make(map[string]bool)
	for _, d := range all {
		require.False(t, names[d.Name], d.Name)
		require.True(t, strings.HasPrefix(d.Name, "docker.io/fast-sandbox/"), d.Name)
		names[d.Name] = true
	}
	for _, name := range []string{"allocator:dev", "controller:dev", "agent:dev", "gateway:dev", "janitor:dev", "pause:dev", "busybox:demo", "python:demo"} {
		require.True(t, names["docker.io/fast-sandbox/"+name], name)
	}
}

func builder(t *testing.T) image.Builder {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\necho sh; echo ls; echo tool\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tool"), []byte(script), 0o755))
	return image.Builder{BinDir: dir, CacheDir: t.TempDir()}
}

var description = image.Description{
	Name: "docker.io/x/y:z", User: "65532:65532", Entrypoint: []string{"/bin/tool"}, Env: []string{"A=b"},
	Files: []image.File{
		{From: "tool", To: "/bin/tool", Applets: "/bin", Links: []string{"/tool"}},
		{From: "absent", To: "/absent", Optional: true},
	},
	Texts:       []image.Text{{Path: "/etc/deep/passwd", Content: "root"}},
	Directories: []image.Directory{{Path: "/tmp", Mode: "1777"}},
}

func entries(t *testing.T, source io.Reader) (map[string]*tar.Header, map[string][]byte) {
	t.Helper()
	headers, contents := make(map[string]*tar.Header), make(map[string][]byte)
	reader := tar.NewReader(source)
	for {
		header, err := reader.Next()
		if errors.Is(err, io.EOF) {
			return headers, contents
		}
		require.NoError(t, err)
		require.NotContains(t, headers, header.Name, "an entry comes once")
		content, err := io.ReadAll(reader)
		require.NoError(t, err)
		headers[header.Name], contents[header.Name] = header, content
	}
}

// The archive is an OCI layout whose digests are right and whose manifest carries the name.
func TestBuildAndWrite(t *testing.T) {
	built, err := builder(t).Build(t.Context(), description)
	require.NoError(t, err)
	var archive bytes.Buffer
	require.NoError(t, built.Write(&archive))
	_, files := entries(t, &archive)

	var index v1.IndexManifest
	require.NoError(t, json.Unmarshal(files["index.json"], &index))
	require.Len(t, index.Manifests, 1)
	require.Equal(t, built.Digest, index.Manifests[0].Digest)
	require.Equal(t, "docker.io/x/y:z", index.Manifests[0].Annotations["io.containerd.image.name"])
	blob := func(d v1.Descriptor) []byte {
		content := files["blobs/sha256/"+d.Digest.Hex]
		sum, size, err := v1.SHA256(bytes.NewReader(content))
		require.NoError(t, err)
		require.Equal(t, d.Digest, sum)
		require.Equal(t, d.Size, size)
		return content
	}
	manifest, err := v1.ParseManifest(bytes.NewReader(blob(index.Manifests[0])))
	require.NoError(t, err)
	config, err := v1.ParseConfigFile(bytes.NewReader(blob(manifest.Config)))
	require.NoError(t, err)
	require.Equal(t, "linux", config.OS)
	require.Equal(t, "65532:65532", config.Config.User)
	require.Equal(t, []string{"/bin/tool"}, config.Config.Entrypoint)
	require.Len(t, manifest.Layers, 1)
	require.Equal(t, []v1.Hash{manifest.Layers[0].Digest}, config.RootFS.DiffIDs, "the layer is not compressed")

	headers, contents := entries(t, bytes.NewReader(blob(manifest.Layers[0])))
	require.EqualValues(t, 0o755, headers["bin/tool"].Mode)
	require.Equal(t, "/bin/tool", headers["bin/ls"].Linkname)
	require.Equal(t, "/bin/tool", headers["tool"].Linkname)
	require.Equal(t, "root", string(contents["etc/deep/passwd"]))
	require.EqualValues(t, tar.TypeDir, headers["etc/deep/"].Typeflag)
	require.EqualValues(t, 0o1777, headers["tmp/"].Mode)
	require.NotContains(t, headers, "absent")
}

// Only content counts: not when or where an image is built, not the times of its files.
func TestDigestDependsOnContent(t *testing.T) {
	first, err := builder(t).Build(t.Context(), description)
	require.NoError(t, err)
	again, err := builder(t).Build(t.Context(), description)
	require.NoError(t, err)
	require.Equal(t, first.Digest, again.Digest)

	changed := description
	changed.Texts = []image.Text{{Path: "/etc/deep/passwd", Content: "toor"}}
	other, err := builder(t).Build(t.Context(), changed)
	require.NoError(t, err)
	require.NotEqual(t, first.Digest, other.Digest)
}

func TestNotBuilt(t *testing.T) {
	b := image.Builder{BinDir: t.TempDir()}
	_, err := b.Build(t.Context(), image.Description{Name: "x", Files: []image.File{{From: "allocator", To: "/allocator"}}})
	require.ErrorIs(t, err, image.ErrNotBuilt)
	_, err = b.Build(t.Context(), image.Description{Name: "x", Files: []image.File{{From: "/no/such/file", To: "/a"}}})
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NotErrorIs(t, err, image.ErrNotBuilt)
}

func TestFilter(t *testing.T) {
	var source bytes.Buffer
	writer := tar.NewWriter(&source)
	for _, header := range []*tar.Header{
		{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./bin", Typeflag: tar.TypeSymlink, Linkname: "usr/bin"},
		{Name: "./usr/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/bin/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/bin/python3", Typeflag: tar.TypeReg, Mode: 0o755, Size: 2},
		{Name: "./usr/bin/hard", Typeflag: tar.TypeLink, Linkname: "./usr/bin/python3"},
		{Name: "./usr/share/doc/", Typeflag: tar.TypeDir, Mode: 0o755},
		{Name: "./usr/share/doc/x", Typeflag: tar.TypeReg, Size: 2},
		{Name: "./usr/share/document", Typeflag: tar.TypeReg, Size: 2},
		{Name: "./dev/null", Typeflag: tar.TypeChar},
	} {
		require.NoError(t, writer.WriteHeader(header))
		if header.Size > 0 {
			_, err := writer.Write([]byte("ok"))
			require.NoError(t, err)
		}
	}
	require.NoError(t, writer.Close())
	layer, err := image.Filter(&source, []string{"/usr/share/doc"})
	require.NoError(t, err)
	content, err := layer.Uncompressed()
	require.NoError(t, err)
	headers, contents := entries(t, content)
	var names []string
	for name := range headers {
		names = append(names, name)
	}
	require.ElementsMatch(t, []string{"bin", "usr/", "usr/bin/", "usr/bin/python3", "usr/bin/hard", "usr/share/", "usr/share/document"}, names)
	require.Equal(t, "usr/bin/python3", headers["usr/bin/hard"].Linkname)
	require.Equal(t, "ok", string(contents["usr/bin/python3"]))
}

func TestCodename(t *testing.T) {
	require.Equal(t, "bookworm", image.Codename("ID=debian\nVERSION_CODENAME=bookworm\n"))
	require.Equal(t, "noble", image.Codename(`VERSION_CODENAME="noble"`))
	require.Empty(t, image.Codename("ID=arch\n"))
}

// TestReleasedImages: those of the components are released, and all of their binaries must be there.
func TestReleasedImages(t *testing.T) {
	all, err := image.Load(filepath.Join("..", "..", "..", "images"))
	require.NoError(t, err)
	b := image.Builder{BinDir: t.TempDir()}
	want := []string{"agent", "allocator", "controller", "gateway", "gc", "janitor"}
	for _, name := range append(want, "containerd-shim-fsb-v1", "containerd-shim-fsb-member-v1", "sandbox-init", "sandbox-helper") {
		_, err := b.Digests(t.Context(), all)
		require.ErrorIs(t, err, image.ErrNotBuilt)
		require.NoError(t, os.WriteFile(filepath.Join(b.BinDir, name), []byte(name), 0o600))
	}
	digests, err := b.Digests(t.Context(), all)
	require.NoError(t, err)
	var names []string
	for name, digest := range digests {
		require.Regexp(t, "^sha256:[0-9a-f]{64}$", digest)
		names = append(names, strings.TrimSuffix(strings.TrimPrefix(name, "docker.io/fast-sandbox/"), ":dev"))
	}
	require.ElementsMatch(t, want, names)

	elsewhere := image.Builder{BinDir: t.TempDir()}
	for _, name := range append(want, "containerd-shim-fsb-v1", "containerd-shim-fsb-member-v1", "sandbox-init", "sandbox-helper") {
		require.NoError(t, os.WriteFile(filepath.Join(elsewhere.BinDir, name), []byte(name), 0o755))
	}
	again, err := elsewhere.Digests(t.Context(), all)
	require.NoError(t, err)
	require.Equal(t, digests, again, "the digests depend on the directory, or on the modes of files")
}

// TestClusterOverlayNamesReleasedImages: the component of the overlay that `make digests` overwrites names each of them, and no other.
func TestClusterOverlayNamesReleasedImages(t *testing.T) {
	all, err := image.Load(filepath.Join("..", "..", "..", "images"))
	require.NoError(t, err)
	var released, named []string
	for _, d := range all {
		if d.Released() {
			released = append(released, strings.TrimSuffix(d.Name, ":dev"))
		}
	}
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "overlays", "cluster", "images", "kustomization.yaml"))
	require.NoError(t, err)
	var component struct {
		Images []struct {
			Name string `json:"name"`
		} `json:"images"`
	}
	require.NoError(t, yaml.Unmarshal(raw, &component))
	for _, i := range component.Images {
		named = append(named, i.Name)
	}
	require.ElementsMatch(t, released, named)
}
