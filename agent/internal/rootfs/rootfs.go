// Package rootfs reads files out of the root file system of an image, whose content its author chose: nothing that it can hold
// makes a read block, take much memory or leave the root. It never writes, and it executes nothing. It may be called
// concurrently. The tree must not change while it is read: it is that of committed layers.
//
// A path is resolved component by component, over all layers, without a mount: symbolic links are followed within the root. A
// file is inspected (O_PATH) before it is opened, so that no device and no FIFO is ever opened.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// maxSteps bounds the components that the resolution of one path visits, those of symbolic links included.
const maxSteps = 32

// FileError is a file that an image must not have. It is errdefs.ErrFailedPrecondition.
type FileError struct {
	// Path in the image; Problem completes "the file ...".
	Path, Problem string
}

// Error returns the path and the problem.
func (e *FileError) Error() string { return e.Path + " " + e.Problem }

// Unwrap returns the class.
func (e *FileError) Unwrap() error { return errdefs.ErrFailedPrecondition }

// ReadFiles returns the content of files, named by absolute paths, of the root file system given by its mounts, which the
// container does not write to yet. A file that does not exist is empty. A file that is not regular, is larger than limit, or
// lies where a container has its own /dev, /proc or /sys, is a *FileError, and so is anything but a directory in place of one of
// these: OCI runtimes have followed links there, out of the root, and written to the node.
//
// An overlay or a bind is read without a mount; other mounts are mounted temporarily, read-only.
func ReadFiles(ctx context.Context, mounts []mount.Mount, limit int64, names ...string) ([]string, error) {
	if l, err := openLayers(layersOf(mounts)); err == nil {
		defer l.close()
		return l.readAll(ctx, limit, names)
	}
	var out []string
	err := mount.WithReadonlyTempMount(ctx, mounts, func(root string) error {
		l, err := openLayers([]string{root})
		if err != nil {
			return err
		}
		defer l.close()
		out, err = l.readAll(ctx, limit, names)
		return err
	})
	return out, err
}

func (l layers) readAll(ctx context.Context, limit int64, names []string) ([]string, error) {
	if err := l.checkMountpoints(); err != nil {
		return nil, err
	}
	out := make([]string, len(names))
	for i, name := range names {
		content, err := l.read(ctx, name, limit)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		out[i] = content
	}
	return out, nil
}

// checkMountpoints returns an error if something else than a directory is where a container has a file system of its own.
func (l layers) checkMountpoints() error {
	for _, name := range mountpoints() {
		n, err := l.lookup([]string{name})
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		isDir := n.isDir()
		n.Close()
		if !isDir {
			return &FileError{Path: "/" + name, Problem: "is not a directory"}
		}
	}
	return nil
}

// read returns the content of one file.
func (l layers) read(ctx context.Context, name string, limit int64) (string, error) {
	bad := func(format string, args ...any) error {
		return &FileError{Path: name, Problem: fmt.Sprintf(format, args...)}
	}
	var resolved []string // without symbolic links
	rest := strings.Split(name, "/")
	for steps := 0; len(rest) > 0; {
		part := rest[0]
		rest = rest[1:]
		switch part {
		case "", ".":
			continue
		case "..":
			resolved = resolved[:max(len(resolved)-1, 0)]
			continue
		}
		if steps++; steps > maxSteps {
			return "", bad("has too many symbolic links or directories in its path")
		}
		if err := ctx.Err(); err != nil {
			return "", err
		}
		if len(resolved) == 0 && isMountpoint(part) {
			return "", bad("leads into /%s, which is not the image's", part)
		}
		resolved = append(resolved, part)
		target, content, err := l.step(resolved, len(rest) == 0, limit)
		switch {
		case errors.Is(err, errTooLarge):
			return "", bad("is larger than %d bytes", limit)
		case errors.Is(err, errNotRegular):
			return "", bad("is not a regular file")
		case errors.Is(err, unix.ENAMETOOLONG):
			return "", bad("has a name in its path that is too long")
		case err != nil:
			return "", err
		case target != "":
			if resolved = resolved[:len(resolved)-1]; target[0] == '/' {
				resolved = nil
			}
			rest = append(strings.Split(target, "/"), rest...)
		case len(rest) == 0:
			return content, nil
		}
	}
	return "", bad("is not a regular file")
}

// step looks up a path that has no symbolic link before its last component. It returns the target if that is a link, and, if no
// component follows it, the content of the file. One that is followed by others must be a directory.
func (l layers) step(path []string, last bool, limit int64) (target, content string, err error) {
	n, err := l.lookup(path)
	if err != nil {
		return "", "", err
	}
	defer n.Close()
	switch {
	case n.isLink():
		target, err = n.readlink()
	case last:
		content, err = n.read(limit)
	case !n.isDir():
		err = fs.ErrNotExist
	}
	return target, content, err
}

// mountpoints are the names in the root of a container at which it has file systems of its own.
func mountpoints() []string { return []string{"dev", "proc", "sys"} }

// isMountpoint reports whether a container has its own file system at a name in its root. An image that links there would have
// one file when it is inspected here, and an endless one (/dev/zero) when an OCI runtime reads it in the container.
func isMountpoint(name string) bool { return slices.Contains(mountpoints(), name) }

var (
	errNotRegular = errors.New("not a regular file")
	errTooLarge   = errors.New("too large")
)

// node is a file of a layer that was inspected and not opened (O_PATH).
type node struct {
	*os.File

	stat unix.Stat_t
}

func (n node) kind() uint32 { return n.stat.Mode & unix.S_IFMT }

func (n node) isLink() bool { return n.kind() == unix.S_IFLNK }

func (n node) isDir() bool { return n.kind() == unix.S_IFDIR }

// isWhiteout reports whether it hides what lower layers have in its place.
func (n node) isWhiteout() bool { return n.kind() == unix.S_IFCHR && n.stat.Rdev == 0 }

// path names the open file, wherever it is.
func (n node) path() string { return fmt.Sprintf("/proc/self/fd/%d", n.Fd()) }

// readlink returns the target of a symbolic link; it is never empty.
func (n node) readlink() (string, error) {
	buf := make([]byte, unix.PathMax)
	length, err := unix.Readlinkat(int(n.Fd()), "", buf)
	return string(buf[:max(length, 0)]), err
}

// read returns the content of a regular file.
func (n node) read(limit int64) (string, error) {
	switch {
	case n.kind() != unix.S_IFREG:
		return "", errNotRegular
	case n.stat.Size > limit:
		return "", errTooLarge
	}
	f, err := os.OpenFile(n.path(), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(raw)) > limit {
		err = errTooLarge
	}
	return string(raw), err
}
