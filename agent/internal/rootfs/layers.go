package rootfs

import (
	"errors"
	"io/fs"
	"os"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// layers holds the layers of a root file system, the uppermost first. Together they show what an overlay of them would:
// whiteouts and opaque directories hide what is below.
type layers []node

// layersOf returns the directories of the layers of mounts; none if the mounts are of another kind than an overlay or a bind.
func layersOf(mounts []mount.Mount) []string {
	if len(mounts) != 1 {
		return nil
	}
	var dirs []string
	switch m := mounts[0]; m.Type {
	case "bind":
		dirs = []string{m.Source}
	case "overlay":
		for _, o := range m.Options {
			if v, ok := strings.CutPrefix(o, "upperdir="); ok {
				dirs = append([]string{v}, dirs...)
			}
			if v, ok := strings.CutPrefix(o, "lowerdir="); ok {
				dirs = append(dirs, strings.Split(v, ":")...)
			}
		}
	}
	return dirs
}

// openLayers opens the directories of layers. It fails if there are none, or if they are not visible here.
func openLayers(dirs []string) (layers, error) {
	var l layers
	for _, dir := range dirs {
		n, err := open(unix.AT_FDCWD, dir, unix.O_DIRECTORY)
		if err != nil {
			l.close()
			return nil, err
		}
		l = append(l, n)
	}
	if len(l) == 0 {
		return nil, errdefs.ErrNotImplemented
	}
	return l, nil
}

func (l layers) close() {
	for _, n := range l {
		_ = n.Close()
	}
}

// lookup returns the file at a path that has no symbolic link before its last component.
func (l layers) lookup(path []string) (node, error) {
	for _, root := range l {
		n, covered, err := root.walk(path)
		if err == nil || covered || !errors.Is(err, fs.ErrNotExist) {
			return n, err
		}
	}
	return node{}, fs.ErrNotExist
}

// walk looks a path up in one layer. covered reports whether the layer hides the path in the layers below.
func (n node) walk(path []string) (found node, covered bool, err error) {
	dir := n
	closeDir := func() {
		if dir.File != n.File {
			_ = dir.Close()
		}
	}
	for i, name := range path {
		next, err := open(int(dir.Fd()), name, unix.O_NOFOLLOW)
		closeDir()
		if err != nil {
			return node{}, covered, err
		}
		dir = next
		switch {
		case dir.isWhiteout(), i < len(path)-1 && !dir.isDir():
			closeDir()
			return node{}, true, fs.ErrNotExist
		case dir.isDir() && dir.isOpaque():
			covered = true
		}
	}
	return dir, true, nil
}

// isOpaque reports whether a directory hides the content of the same directory in lower layers.
func (n node) isOpaque() bool {
	buf := make([]byte, 1)
	for _, attr := range []string{"trusted.overlay.opaque", "user.overlay.opaque"} {
		if length, err := unix.Getxattr(n.path(), attr, buf); err == nil && length == 1 && buf[0] == 'y' {
			return true
		}
	}
	return false
}

// open inspects a file without opening it.
func open(dir int, name string, flags int) (node, error) {
	fd, err := unix.Openat(dir, name, flags|unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return node{}, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	n := node{File: os.NewFile(uintptr(fd), name)}
	if err := unix.Fstat(fd, &n.stat); err != nil {
		_ = n.Close()
		return node{}, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return n, nil
}
