package rootfs_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/rootfs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const limit = 1 << 10

// tree is a directory with a directory for each layer.
type tree struct {
	t   *testing.T
	dir string
}

func newTree(t *testing.T) tree { return tree{t, t.TempDir()} }

// path returns where a layer has a file, whose directory it creates.
func (tr tree) path(layer, name string) string {
	tr.t.Helper()
	path := filepath.Join(tr.dir, layer, name)
	require.NoError(tr.t, os.MkdirAll(filepath.Dir(path), 0o755))
	return path
}

func (tr tree) put(layer, name, text string) {
	tr.t.Helper()
	require.NoError(tr.t, os.WriteFile(tr.path(layer, name), []byte(text), 0o600))
}

func (tr tree) link(layer, name, target string) {
	tr.t.Helper()
	require.NoError(tr.t, os.Symlink(target, tr.path(layer, name)))
}

func (tr tree) mknod(layer, name string, mode uint32, device int) {
	tr.t.Helper()
	require.NoError(tr.t, unix.Mknod(tr.path(layer, name), mode, device), "devices need root")
}

func (tr tree) overlay(layers ...string) []mount.Mount {
	tr.t.Helper()
	for i, l := range layers {
		layers[i] = filepath.Join(tr.dir, l)
		require.NoError(tr.t, os.MkdirAll(layers[i], 0o755))
	}
	return []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"index=off", "lowerdir=" + strings.Join(layers, ":")}}}
}

func (tr tree) bind(layer string) []mount.Mount {
	return []mount.Mount{{Type: "bind", Source: filepath.Join(tr.dir, layer), Options: []string{"rbind", "ro"}}}
}

func read(t *testing.T, m []mount.Mount, names ...string) []string {
	t.Helper()
	out, err := rootfs.ReadFiles(t.Context(), m, limit, names...)
	require.NoError(t, err)
	return out
}

func TestReadFilesOfLayers(t *testing.T) {
	tr := newTree(t)
	users := func(m []mount.Mount) []string { return read(t, m, "/etc/passwd", "/etc/group") }
	tr.put("base", "etc/passwd", "base")
	tr.put("base", "etc/group", "group")
	tr.put("top", "etc/passwd", "top")
	require.Equal(t, []string{"top", "group"}, users(tr.overlay("top", "base")))
	require.Equal(t, []string{"base", "group"}, users(tr.overlay("empty", "base")))
	require.Equal(t, []string{"", ""}, users(tr.overlay("empty", "empty2")))
	require.Equal(t, []string{"base", "group"}, users(tr.bind("base")))

	tr.mknod("whiteout", "etc/passwd", unix.S_IFCHR, 0)
	require.Equal(t, []string{"", "group"}, users(tr.overlay("whiteout", "top", "base")))
	tr.mknod("nothing", "etc", unix.S_IFCHR, 0)
	require.Equal(t, []string{"", ""}, users(tr.overlay("nothing", "top", "base")))
	tr.put("file", "etc", "not a directory")
	require.Equal(t, []string{"", ""}, users(tr.overlay("file", "top", "base")))
	require.Equal(t, []string{"top", ""}, users(tr.overlay("top", "file", "base")), "a file below a directory ends it")
	tr.put("opaque", "etc/group", "opaque")
	require.NoError(t, unix.Setxattr(filepath.Join(tr.dir, "opaque/etc"), "trusted.overlay.opaque", []byte("y"), 0))
	require.Equal(t, []string{"", "opaque"}, users(tr.overlay("opaque", "top", "base")))
}

// TestMountpointsAreDirectories: where a container has file systems of its own, an image has a directory or nothing.
func TestMountpointsAreDirectories(t *testing.T) {
	for _, name := range []string{"dev", "proc", "sys"} {
		for kind, put := range map[string]func(tr tree){
			"link out of the root": func(tr tree) { tr.link("top", name, "/var/lib") },
			"link to a directory":  func(tr tree) { tr.put("top", "other/file", "x"); tr.link("top", name, "other") },
			"dangling link":        func(tr tree) { tr.link("top", name, "nowhere") },
			"file":                 func(tr tree) { tr.put("top", name, "x") },
			"FIFO":                 func(tr tree) { tr.mknod("top", name, unix.S_IFIFO, 0) },
		} {
			tr := newTree(t)
			tr.put("base", "etc/passwd", "base")
			tr.put("base", name+"/file", "in the directory of a lower layer")
			require.Equal(t, []string{"base"}, read(t, tr.overlay("base"), "/etc/passwd"))
			put(tr)
			_, err := rootfs.ReadFiles(t.Context(), tr.overlay("top", "base"), limit, "/etc/passwd")
			require.True(t, errdefs.IsFailedPrecondition(err), "%s in place of /%s: %v", kind, name, err)
			require.ErrorContains(t, err, "/"+name+" is not a directory")
			require.Equal(t, []string{"base"}, read(t, tr.overlay("base", "top"), "/etc/passwd"), "the upper layer hides it")
		}
	}
}

// TestAgainstTheKernel compares what is read with what an overlay mount of the same layers shows.
func TestAgainstTheKernel(t *testing.T) {
	tr := newTree(t)
	tr.put("base", "data/passwd", "data")
	tr.put("base", "data/dir/deep", "deep")
	tr.put("base", "etc/plain", "plain")
	tr.put("top", "other/passwd", "other")
	tr.put("top", "plain/file", "a directory over a link")
	tr.link("base", "plain", "etc/plain")
	tr.mknod("top", "etc/hidden", unix.S_IFCHR, 0)
	tr.put("base", "etc/hidden", "hidden")
	links := map[string]string{
		"relative": "../data/passwd", "absolute": "/data/passwd", "upper": "/other/passwd", "twice": "absolute", "above": "/../../../data/passwd",
		"through": "/var/dir/deep", "dangling": "/nowhere", "slash": "/data/passwd/", "dots": "./../data/./dir/../passwd", "covered": "hidden",
		"under": "/plain/file",
	}
	for name, target := range links {
		tr.link("top", "etc/"+name, target)
	}
	tr.link("base", "var", "data")
	m := tr.overlay("top", "base")
	at := t.TempDir()
	require.NoError(t, m[0].Mount(at), "mounting needs root")
	t.Cleanup(func() { require.NoError(t, unix.Unmount(at, 0)) })
	root, err := os.Open(at)
	require.NoError(t, err)
	defer root.Close()
	for name := range links {
		t.Run(name, func(t *testing.T) {
			var want string
			fd, err := openInRoot(int(root.Fd()), "etc/"+name)
			if err == nil {
				defer unix.Close(fd)
				buf := make([]byte, limit)
				n, err := unix.Read(fd, buf)
				require.NoError(t, err)
				want = string(buf[:n])
			}
			require.Equal(t, []string{want}, read(t, m, "/etc/"+name))
		})
	}
}

// TestHostileFiles has files that must not be read. A version that opened them hung on the FIFO.
func TestHostileFiles(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	require.NoError(t, os.WriteFile(outside, []byte("secret"), 0o600))
	for name, c := range map[string]struct {
		make func(tr tree)
		want string // the error; none: the file does not exist
	}{
		"fifo":         {func(tr tree) { tr.mknod("top", "etc/passwd", unix.S_IFIFO|0o644, 0) }, "/etc/passwd is not a regular file"},
		"socket":       {func(tr tree) { tr.mknod("top", "etc/passwd", unix.S_IFSOCK|0o644, 0) }, "/etc/passwd is not a regular file"},
		"/dev/zero":    {func(tr tree) { tr.mknod("top", "etc/passwd", unix.S_IFCHR|0o644, 1<<8|5) }, "/etc/passwd is not a regular file"},
		"block device": {func(tr tree) { tr.mknod("top", "etc/passwd", unix.S_IFBLK|0o644, 7<<8) }, "/etc/passwd is not a regular file"},
		"directory":    {func(tr tree) { tr.put("top", "etc/passwd/file", "") }, "/etc/passwd is not a regular file"},
		"link to fifo": {func(tr tree) {
			tr.mknod("base", "tmp/pipe", unix.S_IFIFO|0o644, 0)
			tr.link("top", "etc/passwd", "/tmp/pipe")
		}, "/etc/passwd is not a regular file"},
		"link to the root": {func(tr tree) { tr.link("top", "etc/passwd", "/") }, "/etc/passwd is not a regular file"},
		"huge": {func(tr tree) {
			tr.put("top", "etc/passwd", "")
			require.NoError(tr.t, os.Truncate(tr.path("top", "etc/passwd"), 1<<40))
		}, "/etc/passwd is larger than 1024 bytes"},
		"one byte too many":       {func(tr tree) { tr.put("top", "etc/passwd", strings.Repeat("x", limit+1)) }, "/etc/passwd is larger than 1024 bytes"},
		"link to the next":        {func(tr tree) { tr.link("top", "etc/passwd", "/dev/zero") }, "/etc/passwd leads into /dev, which is not the image's"},
		"link to a process":       {func(tr tree) { tr.link("top", "etc/passwd", "../proc/self/fd/0") }, "/etc/passwd leads into /proc, which is not the image's"},
		"directory links to /sys": {func(tr tree) { tr.link("top", "etc", "./../sys") }, "/etc/passwd leads into /sys, which is not the image's"},
		"link to itself":          {func(tr tree) { tr.link("top", "etc/passwd", "passwd") }, "/etc/passwd has too many symbolic links or directories in its path"},
		"growing path":            {func(tr tree) { tr.link("top", "etc", "etc/etc") }, "/etc/passwd has too many symbolic links or directories in its path"},
		"deep path":               {func(tr tree) { tr.link("top", "etc/passwd", "/"+strings.Repeat("a/", 100)) }, ""},
		"long name":               {func(tr tree) { tr.link("top", "etc/passwd", "/"+strings.Repeat("a", 300)) }, "/etc/passwd has a name in its path that is too long"},
		"absolute link out of it": {func(tr tree) { tr.link("top", "etc/passwd", outside) }, ""},
		"relative link out of it": {func(tr tree) { tr.link("top", "etc/passwd", strings.Repeat("../", 20)+outside) }, ""},
		"fifo as the directory":   {func(tr tree) { tr.mknod("top", "etc", unix.S_IFIFO|0o644, 0) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tr := newTree(t)
			c.make(tr)
			for kind, m := range map[string][]mount.Mount{"overlay": tr.overlay("top", "base"), "bind": tr.bind("top")} {
				if name == "link to fifo" && kind == "bind" {
					continue // the FIFO is in the other layer
				}
				out, err := rootfs.ReadFiles(t.Context(), m, limit, "/etc/passwd")
				if c.want == "" {
					require.NoError(t, err)
					require.Equal(t, []string{""}, out, kind)
					continue
				}
				require.EqualError(t, err, c.want, kind)
				var known *rootfs.FileError
				require.ErrorAs(t, err, &known)
				require.True(t, errdefs.IsFailedPrecondition(err))
			}
		})
	}
}

func TestLimitIsAllowed(t *testing.T) {
	tr := newTree(t)
	tr.put("top", "etc/passwd", strings.Repeat("x", limit))
	require.Len(t, read(t, tr.bind("top"), "/etc/passwd")[0], limit)
}

// TestWorkIsBounded has as many layers, links and directories as an image may have, each as deep as possible.
func TestWorkIsBounded(t *testing.T) {
	tr := newTree(t)
	layers := make([]string, 128)
	for i := range layers {
		layers[i] = fmt.Sprintf("layer%d", i)
		require.NoError(t, os.MkdirAll(filepath.Join(tr.dir, layers[i], strings.Repeat("a/", 30)), 0o755))
	}
	tr.link(layers[127], strings.Repeat("a/", 29)+"b", "/"+strings.Repeat("a/", 29)+"b")
	tr.link(layers[127], "etc/passwd", "/"+strings.Repeat("a/", 29)+"b")
	m, begun := tr.overlay(layers...), time.Now()
	_, err := rootfs.ReadFiles(t.Context(), m, limit, "/etc/passwd")
	t.Logf("refused after %v", time.Since(begun))
	require.ErrorContains(t, err, "too many symbolic links or directories")
}

func TestReadingEndsWithTheContext(t *testing.T) {
	tr := newTree(t)
	tr.put("top", "etc/passwd", "x")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := rootfs.ReadFiles(ctx, tr.bind("top"), limit, "/etc/passwd")
	require.ErrorIs(t, err, context.Canceled)
}
