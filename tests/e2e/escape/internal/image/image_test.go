package image_test

import (
	"archive/tar"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/attack"
	"github.com/fast-sandbox/fast-sandbox/tests/e2e/escape/internal/image"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// entries returns the entries of a layer as they are in the archive.
func entries(t *testing.T, i image.Image, layer int) map[string]*tar.Header {
	t.Helper()
	img, err := i.Build()
	require.NoError(t, err)
	layers, err := img.Layers()
	require.NoError(t, err)
	r, err := layers[layer].Uncompressed()
	require.NoError(t, err)
	defer func() { require.NoError(t, r.Close()) }()
	out := map[string]*tar.Header{}
	for archive := tar.NewReader(r); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		require.NoError(t, err)
		out[h.Name] = h
	}
}

func TestBase(t *testing.T) {
	found := entries(t, image.Image{Ref: "docker.io/a/b:c", Layers: [][]image.Entry{image.Base([]byte("program"))}}, 0)
	require.EqualValues(t, 0o4755, found[strings.TrimPrefix(attack.SetUID, "/")].Mode)
	caps := found[strings.TrimPrefix(attack.FileCapabilities, "/")].PAXRecords["SCHILY.xattr.security.capability"]
	require.Len(t, caps, 20, "struct vfs_cap_data, revision 2")
	require.Equal(t, byte(1), caps[0], "effective")
	require.Equal(t, byte(1<<(21-16)), caps[6], "CAP_SYS_ADMIN is permitted")
	require.Contains(t, found, "hostile")
}

// TestHostileImages: they are as hostile as they say, after all that archives do to names.
func TestHostileImages(t *testing.T) {
	list := image.HostileImages("docker.io/x/escape", "/var/lib/canary/canary", []byte("program"))
	names, refs := map[string]bool{}, map[string]bool{}
	for _, h := range list {
		require.False(t, names[h.Name], h.Name)
		require.False(t, refs[h.Ref], h.Ref)
		names[h.Name], refs[h.Ref] = true, true
		require.NotEmpty(t, h.Does)
		for i := range h.Layers {
			require.NotEmpty(t, entries(t, h.Image, i), h.Name)
		}
	}
	find := func(name string) image.Hostile {
		for _, h := range list {
			if h.Name == name {
				return h
			}
		}
		t.Fatalf("there is no image %q", name)
		return image.Hostile{}
	}
	up := strings.Repeat("../", 24) + "var/lib/canary"
	require.Contains(t, entries(t, find("names that walk up").Image, 1), up+"/written-up")
	require.Equal(t, up+"/canary", entries(t, find("hard links").Image, 1)["hard"].Linkname)
	require.Contains(t, entries(t, find("whiteouts").Image, 2), "link/.wh.canary")
	require.Equal(t, byte(tar.TypeFifo), entries(t, find("a FIFO in place of /etc/passwd").Image, 1)["etc/passwd"].Typeflag)
	require.NotContains(t, entries(t, find("a link in place of /proc").Image, 0), "proc/")
}
