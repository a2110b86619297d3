// Package tree measures what the files of a sandbox take on its node's disk, while the sandbox changes them as it likes: it deletes
// and renames what is being measured, and makes trees that no other program can walk. Nothing in a tree makes a measurement fail, leave
// the tree, block, or take memory or time without a bound. It never writes. Measure may be called concurrently.
//
// A directory is opened by its name in the directory above it, so that neither long paths nor symbolic links matter, and is held open
// while what is below it is measured. What a sandbox moves meanwhile may count twice or not at all, and a file that it holds open
// after it has deleted it is not seen.
package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

const (
	// MaxDepth is how deep directories may nest. A path of 4,096 bytes, the longest that the kernel takes, has 2,048 at most.
	MaxDepth = 512
	// batch is how many names of a directory are read at a time.
	batch = 64
	// blockSize is the unit of the blocks of a file in stat(2).
	blockSize = 512
)

// ErrTooDeep is the error of a tree whose directories nest deeper than MaxDepth. It is errdefs.ErrOutOfRange.
var ErrTooDeep = fmt.Errorf("directories nest deeper than %d: %w", MaxDepth, errdefs.ErrOutOfRange)

// Measure returns the disk space and the number of names in a directory. It stops as soon as a field of limit that is not zero is
// exceeded, and returns what it has counted until then. A name counts as an inode, and the space of a file with several names counts
// once. The error is ErrTooDeep, that of ctx, or that of the disk.
func Measure(ctx context.Context, dir string, limit runtime.DiskUsage) (runtime.DiskUsage, error) {
	root, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return runtime.DiskUsage{}, &os.PathError{Op: "measuring", Path: dir, Err: err}
	}
	w := &walk{limit: limit, levels: []*level{{dir: os.NewFile(uintptr(root), dir)}}}
	defer w.close()
	for len(w.levels) > 0 && !w.exceeded() {
		if err := ctx.Err(); err != nil {
			return w.used, err
		}
		if err := w.step(); err != nil {
			return w.used, fmt.Errorf("measuring %s: %w", dir, err)
		}
	}
	return w.used, nil
}

// walk is a measurement. It holds the directories from the root to the current one.
type walk struct {
	limit, used runtime.DiskUsage
	levels      []*level
}

// level is an open directory, and those of its last names that are directories and have not been entered.
type level struct {
	dir  *os.File
	next []string
}

func (w *walk) close() {
	for _, l := range w.levels {
		_ = l.dir.Close()
	}
}

func (w *walk) exceeded() bool {
	return w.limit.Bytes > 0 && w.used.Bytes > w.limit.Bytes || w.limit.Inodes > 0 && w.used.Inodes > w.limit.Inodes
}

// step enters the next directory, or reads some names of the current one, or leaves it.
func (w *walk) step() error {
	l := w.levels[len(w.levels)-1]
	if n := len(l.next); n > 0 {
		name := l.next[n-1]
		l.next = l.next[:n-1]
		return w.enter(l, name)
	}
	names, err := l.dir.Readdirnames(batch)
	for _, name := range names {
		if err := w.count(l, name); err != nil {
			return err
		}
	}
	switch {
	case errors.Is(err, io.EOF) || gone(err):
		w.levels = w.levels[:len(w.levels)-1]
		return l.dir.Close()
	case err != nil:
		return err
	}
	return nil
}

// enter opens a directory. What is something else by now is not opened: it was counted.
func (w *walk) enter(l *level, name string) error {
	fd, err := unix.Openat(int(l.dir.Fd()), name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case gone(err):
		return nil
	case err != nil:
		return &os.PathError{Op: "opening", Path: name, Err: err}
	}
	w.levels = append(w.levels, &level{dir: os.NewFile(uintptr(fd), name)})
	if len(w.levels) > MaxDepth {
		return ErrTooDeep
	}
	return nil
}

// count counts a name.
func (w *walk) count(l *level, name string) error {
	var s unix.Stat_t
	err := unix.Fstatat(int(l.dir.Fd()), name, &s, unix.AT_SYMLINK_NOFOLLOW)
	switch {
	case gone(err):
		return nil
	case err != nil:
		return &os.PathError{Op: "measuring", Path: name, Err: err}
	}
	isDir := s.Mode&unix.S_IFMT == unix.S_IFDIR
	w.used.Inodes++
	if bytes := s.Blocks * blockSize; isDir {
		w.used.Bytes += bytes
		l.next = append(l.next, name)
	} else {
		w.used.Bytes += bytes / max(int64(s.Nlink), 1) // all names of the file are in this tree
	}
	return nil
}

// gone reports whether an error says that a name is no longer that of what it was.
func gone(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP)
}
