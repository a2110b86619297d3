package containerd

import (
	"archive/tar"
	"bytes"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
)

// Busybox is the reference of the image that Import imports.
const Busybox = "docker.io/library/busybox:test"

// applets are the links to busybox in /bin.
const applets = "sh cat echo sleep ls id env hostname true false kill ps mount nc wget head tail dd yes seq grep touch mkdir chmod ulimit ip stat date sync awk"

// Option changes an image.
type Option func(*v1.ConfigFile, *[]file)

type file struct {
	name, content string
	mode          int64
	link          string
	owner         int  // user and group
	kind          byte // tar.TypeReg, without a link, if it is zero
}

// WithUser sets the image's user.
func WithUser(user string) Option { return func(c *v1.ConfigFile, _ *[]file) { c.Config.User = user } }

// WithCommand sets the image's entry point and arguments.
func WithCommand(entrypoint, cmd []string) Option {
	return func(c *v1.ConfigFile, _ *[]file) { c.Config.Entrypoint, c.Config.Cmd = entrypoint, cmd }
}

// WithEnv adds to the image's environment.
func WithEnv(env ...string) Option {
	return func(c *v1.ConfigFile, _ *[]file) { c.Config.Env = append(c.Config.Env, env...) }
}

// WithFile adds a file in a layer of its own.
func WithFile(path, content string, mode int64) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, content: content, mode: mode}) }
}

// WithOwner adds a file of a user and the group with the same id, in a layer of its own.
func WithOwner(path string, owner int, mode int64) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, mode: mode, owner: owner}) }
}

// WithLink adds a symbolic link in a layer of its own.
func WithLink(path, target string) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, link: target}) }
}

// WithFIFO adds a FIFO in a layer of its own.
func WithFIFO(path string) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, mode: 0o777, kind: tar.TypeFifo}) }
}

// WithDevice adds the device that is /dev/zero, in a layer of its own.
func WithDevice(path string) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, mode: 0o666, kind: tar.TypeChar}) }
}

// WithDirectory adds a directory in a layer of its own.
func WithDirectory(path string) Option {
	return func(_ *v1.ConfigFile, f *[]file) { *f = append(*f, file{name: path, mode: 0o755, kind: tar.TypeDir}) }
}

// WithLabel sets a label of the image's configuration.
func WithLabel(key, value string) Option {
	return func(c *v1.ConfigFile, _ *[]file) { c.Config.Labels = map[string]string{key: value} }
}

// Image builds a small image around the machine's static busybox, in memory: user app (1000, groups app and extra), a
// file /data.txt that is not executable, and /bin/garbage, which is executable but not a program.
func Image(t testing.TB, options ...Option) v1.Image {
	t.Helper()
	busybox, err := os.ReadFile("/bin/busybox")
	require.NoError(t, err, "the test image needs busybox (apt-get install busybox-static)")
	files := []file{
		{name: "bin/busybox", content: string(busybox), mode: 0o755},
		{name: "etc/passwd", content: "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000:app:/home/app:/bin/sh\n", mode: 0o644},
		{name: "etc/group", content: "root:x:0:\napp:x:1000:\nextra:x:2000:app\n", mode: 0o644},
		{name: "data.txt", content: "data\n", mode: 0o644},
		{name: "bin/garbage", content: "no program\x00\x01", mode: 0o755},
	}
	for _, a := range strings.Fields(applets) {
		files = append(files, file{name: "bin/" + a, link: "busybox"})
	}
	cf := &v1.ConfigFile{Architecture: "amd64", OS: "linux", Config: v1.Config{
		Env: []string{"PATH=/bin", "FROM_IMAGE=yes"}, Cmd: []string{"sh", "-c", "echo default command"},
	}}
	var extra []file
	for _, o := range options {
		o(cf, &extra)
	}
	layers := []v1.Layer{layer(t, files)}
	if len(extra) > 0 {
		layers = append(layers, layer(t, extra))
	}
	img, err := mutate.ConfigFile(empty.Image, cf)
	require.NoError(t, err)
	img, err = mutate.AppendLayers(img, layers...)
	require.NoError(t, err)
	return img
}

// Layers returns an image with n layers, each with one small file.
func Layers(t testing.TB, n int) v1.Image {
	t.Helper()
	var layers []v1.Layer
	for i := range n {
		layers = append(layers, layer(t, []file{{name: "data.txt", content: strconv.Itoa(i), mode: 0o644}}))
	}
	img, err := mutate.AppendLayers(Image(t), layers...)
	require.NoError(t, err)
	return img
}

// Broken returns an image whose layer is not an archive.
func Broken(t testing.TB) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(Image(t), static.NewLayer([]byte("no archive"), types.DockerUncompressedLayer))
	require.NoError(t, err)
	return img
}

func layer(t testing.TB, files []file) v1.Layer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, dir := range []string{"bin", "etc", "tmp", "root", "home", "home/app", "proc", "sys", "dev"} {
		if slices.ContainsFunc(files, func(f file) bool { return strings.TrimPrefix(f.name, "/") == dir }) {
			continue // the file replaces it
		}
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		require.NoError(t, w.WriteHeader(&tar.Header{Name: dir + "/", Typeflag: tar.TypeDir, Mode: mode, ModTime: time.Unix(0, 0)}))
	}
	for _, f := range files {
		h := &tar.Header{Name: strings.TrimPrefix(f.name, "/"), Typeflag: tar.TypeReg, Mode: f.mode, Size: int64(len(f.content)), ModTime: time.Unix(0, 0), Uid: f.owner, Gid: f.owner}
		switch {
		case f.link != "":
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, f.link, 0
		case f.kind != 0:
			h.Typeflag, h.Devmajor, h.Devminor = f.kind, 1, 5
		}
		require.NoError(t, w.WriteHeader(h))
		_, err := io.WriteString(w, f.content)
		require.NoError(t, err)
	}
	require.NoError(t, w.Close())
	raw := buf.Bytes()
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
	require.NoError(t, err)
	return l
}

// Import imports an image into containerd as ref, unpacked.
func (s *Server) Import(t testing.TB, ref string, img v1.Image) {
	t.Helper()
	for _, i := range s.ImportPacked(t, ref, img) {
		require.NoError(t, client.NewImage(s.Client, i).Unpack(t.Context(), ctrd.DefaultSnapshotter))
	}
}

// ImportPacked imports an image into containerd as ref and does not unpack it.
func (s *Server) ImportPacked(t testing.TB, ref string, img v1.Image) []images.Image {
	t.Helper()
	// A client that reads layers, too.
	c, err := client.New(s.Socket, client.WithDefaultNamespace(ctrd.DefaultNamespace))
	require.NoError(t, err)
	defer c.Close()
	tag, err := name.NewTag(ref)
	require.NoError(t, err)
	var buf bytes.Buffer
	require.NoError(t, tarball.Write(tag, img, &buf))
	imported, err := c.Import(t.Context(), &buf)
	require.NoError(t, err)
	for _, i := range imported {
		if i.Name != ref {
			// The archive format normalizes names.
			meta := i
			meta.Name = ref
			_, err := c.ImageService().Create(t.Context(), meta)
			require.NoError(t, err)
			require.NoError(t, c.ImageService().Delete(t.Context(), i.Name))
		}
	}
	return imported
}

// Registry is an image registry on loopback.
type Registry struct {
	// Host is its host:port.
	Host string

	server *httptest.Server
}

// NewRegistry serves a registry until the test ends. With a user it requires basic authentication. handler (may be nil)
// receives each request first and may answer it by returning true.
func NewRegistry(t testing.TB, user, password string, handler func(http.ResponseWriter, *http.Request) bool) *Registry {
	t.Helper()
	inner := registry.New(registry.Logger(discard()))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if handler != nil && handler(w, r) {
			return
		}
		u, p, _ := r.BasicAuth()
		if user != "" && (u != user || p != password) {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return &Registry{Host: strings.TrimPrefix(server.URL, "http://"), server: server}
}

// Push pushes an image to the registry and returns its reference.
func (r *Registry) Push(t testing.TB, repository string, img v1.Image, options ...remote.Option) string {
	t.Helper()
	ref, err := name.ParseReference(r.Host+"/"+repository, name.Insecure)
	require.NoError(t, err)
	require.NoError(t, remote.Write(ref, img, options...))
	return ref.Name()
}

// Close stops the registry before the test ends.
func (r *Registry) Close() { r.server.Close() }

func discard() *log.Logger { return log.New(io.Discard, "", 0) }
