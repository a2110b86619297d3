package ctrd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// maxUserFile bounds what is read of an image's /etc/passwd.
const maxUserFile = 1 << 20

// layers is a read-only view of an overlay's layers, the uppermost first, without a mount. It handles what image layers
// contain: whiteouts, opaque directories, and symbolic links within a layer.
type layers []string

// readFiles reads files of a root file system given by its mounts; a file that does not exist is empty. Mounts that are
// neither an overlay nor a bind are mounted temporarily.
func readFiles(ctx context.Context, mounts []mount.Mount, names ...string) ([]string, error) {
	if l, ok := layersOf(mounts); ok {
		if out, err := readAll(l, names); err == nil {
			return out, nil
		}
		// For instance a symbolic link across layers: the kernel resolves it.
	}
	var out []string
	err := mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
		r, err := os.OpenRoot(root)
		if err != nil {
			return err
		}
		defer r.Close()
		out, err = readAll(r.FS(), names)
		return err
	})
	return out, err
}

func readAll(files fs.FS, names []string) ([]string, error) {
	out := make([]string, len(names))
	for i, name := range names {
		f, err := files.Open(name)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		info, err := f.Stat()
		if err == nil && !info.Mode().IsRegular() {
			err = fmt.Errorf("%s is not a regular file: %w", name, errdefs.ErrFailedPrecondition)
		}
		var raw []byte
		if err == nil {
			raw, err = io.ReadAll(io.LimitReader(f, maxUserFile))
		}
		f.Close()
		if err != nil {
			return nil, err
		}
		out[i] = string(raw)
	}
	return out, nil
}

// layersOf returns the layer directories of mounts. ok is false if the mounts are of another kind, or not visible here.
func layersOf(mounts []mount.Mount) (layers, bool) {
	if len(mounts) != 1 {
		return nil, false
	}
	var dirs layers
	switch m := mounts[0]; m.Type {
	case "bind":
		dirs = layers{m.Source}
	case "overlay":
		for _, o := range m.Options {
			if v, ok := strings.CutPrefix(o, "upperdir="); ok {
				dirs = append(layers{v}, dirs...)
			}
			if v, ok := strings.CutPrefix(o, "lowerdir="); ok {
				dirs = append(dirs, strings.Split(v, ":")...)
			}
		}
	}
	for _, d := range dirs {
		if _, err := os.Stat(d); err != nil {
			return nil, false
		}
	}
	return dirs, len(dirs) > 0
}

// errCrossing means that only the kernel can resolve the path.
var errCrossing = errors.New("the path has a link that may lead into another layer")

// Open opens a file of the uppermost layer that has it.
func (l layers) Open(name string) (fs.File, error) {
	for _, dir := range l {
		f, covered, err := openIn(dir, name)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if covered {
			break
		}
	}
	return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

// openIn opens name in one layer. covered reports whether the layer hides it in the layers below.
func openIn(dir, name string) (f fs.File, covered bool, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, false, err
	}
	defer root.Close()
	parts := strings.Split(name, "/")
	opaque := false
	for i := range parts {
		p := path.Join(parts[:i+1]...)
		info, err := root.Lstat(p)
		if err != nil {
			return nil, opaque, err
		}
		st, ok := info.Sys().(*syscall.Stat_t)
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			return nil, false, errCrossing
		case info.Mode()&fs.ModeCharDevice != 0 && ok && st.Rdev == 0:
			return nil, true, fs.ErrNotExist
		case info.IsDir() && isOpaque(path.Join(dir, p)):
			opaque = true
		}
	}
	file, err := root.Open(name)
	return file, true, err
}

func isOpaque(dir string) bool {
	buf := make([]byte, 1)
	for _, attr := range []string{"trusted.overlay.opaque", "user.overlay.opaque"} {
		if n, err := unix.Lgetxattr(dir, attr, buf); err == nil && n == 1 && buf[0] == 'y' {
			return true
		}
	}
	return false
}
