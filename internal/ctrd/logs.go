package ctrd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// logAttempts is how often the removal of a log directory is attempted, at once: only a file that is created meanwhile makes it fail.
const logAttempts = 4

// logs is the directory of the log directories.
type logs struct {
	// root holds a directory for each container, named by its id; empty for none.
	root string
	// keep keeps a log directory, except a slot's private directory in it.
	keep bool
}

// list returns the log directories of the wanted containers, including those that are being created.
func (l logs) list(wanted func(id string) bool) ([]Piece, error) {
	if l.root == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(l.root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Piece
	for _, e := range entries {
		p := Piece{ID: e.Name(), Part: PartLog, Path: filepath.Join(l.root, e.Name())}
		name, isNew := strings.CutPrefix(e.Name(), NewLogPrefix)
		if isNew {
			// The owner is a uid, 36 characters long.
			if p.ID = ""; len(name) > 37 {
				p.Owner, p.ID = name[:36], name[37:]
			}
		}
		if !e.IsDir() || !wanted(p.ID) {
			continue
		}
		if raw, err := os.ReadFile(filepath.Join(p.Path, OwnerFile)); err == nil && !isNew {
			p.Owner = string(raw)
		}
		p.Deleted, p.Written = modified(filepath.Join(p.Path, deletedFile)), modified(filepath.Join(p.Path, OutputFile))
		if p.Written.IsZero() {
			p.Written = modified(p.Path)
		}
		out = append(out, p)
	}
	return out, nil
}

// deletedFile, in a log directory, marks when the container was deleted.
const deletedFile = "deleted"

// modified returns when a file was last written; zero if it does not exist.
func modified(path string) time.Time {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// markDeleted marks a container's log directory, if there is one, as that of a deleted container.
func (l logs) markDeleted(id string) error {
	if l.root == "" || !validID(id) {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(l.root, id, deletedFile), os.O_CREATE|os.O_WRONLY, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("marking the log of container %s: %w", id, err)
	}
	return f.Close()
}

// remove removes the log directory. An agent that checks the log may create a file in the directory after it was listed
// and before it is removed: then the removal is repeated.
func (l logs) remove(id string) error {
	if l.root == "" {
		return nil
	}
	dir := filepath.Join(l.root, id)
	dirs := []string{dir}
	if l.keep {
		dirs = []string{filepath.Join(dir, ClaimDir), filepath.Join(dir, ClaimedDir)}
	}
	for _, dir := range dirs {
		var err error
		for range logAttempts {
			if err = os.RemoveAll(dir); !errors.Is(err, syscall.ENOTEMPTY) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("removing the log of container %s: %w", id, err)
		}
	}
	return nil
}

// usage returns the disk space that the removal of a container's log directory frees.
func (l logs) usage(id string) int64 {
	if l.root == "" || l.keep {
		return 0
	}
	return diskUsage(filepath.Join(l.root, id))
}

// diskUsage returns the disk space that the files below a directory take.
func diskUsage(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil //nolint:nilerr // removed concurrently
		}
		if info, err := e.Info(); err == nil {
			if s, ok := info.Sys().(*syscall.Stat_t); ok {
				sum += s.Blocks * 512
			}
		}
		return nil
	})
	return sum
}
