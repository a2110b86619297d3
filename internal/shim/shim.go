// Package shim owns the versions of our shim that are installed on a node, each in a directory of its own that is named after its content, and
// removes those that are not in use. It does not know what uses a version besides agents: its caller does.
//
// A version has a lock file. An agent holds it shared from before it installs or finds the version until its process ends, so that a version that
// was just installed is in use although no container has it yet. A version is removed only by a process that holds the lock alone, and moved
// away first: an agent that opened the file before notices that it is no longer there, and installs the version again.
//
//	agent                              collector
//	open lock, creating it             open lock; there is none: an agent without this protocol has it, keep
//	lock shared, or try later          lock exclusively, or keep
//	the file is still there, or again  ask whether records or processes use it, or keep
//	install, record, start             move away, delete, unlock
//
// All of it may be called concurrently, by any number of processes of a node.
package shim

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

const (
	// Binary is the name of the program. It has the form that containerd expects of a shim.
	Binary = "containerd-shim-fsb-v1"
	// Member is that of the program that containerd executes after each container of a shim. It has the same form.
	Member = "containerd-shim-fsb-member-v1"
	// prefix begins the names of versions.
	prefix = "shim-"
	// oldPrefix begins the names of versions that are being deleted.
	oldPrefix = ".old-"
	lockFile  = "lock"
)

// Version returns the name of the version that a program belongs to, by its path; empty if it is none of ours.
func Version(path string) string {
	dir, file := filepath.Split(path)
	if name := filepath.Base(dir); (file == Binary || file == Member) && strings.HasPrefix(name, prefix) {
		return name
	}
	return ""
}

// Installed is a version that this process uses.
type Installed struct {
	// Path is that of Binary.
	Path string

	lock *os.File
}

// MemberPath is that of Member.
func (i *Installed) MemberPath() string { return filepath.Join(filepath.Dir(i.Path), Member) }

// Install installs both programs below dir, unless they are there, and marks the version as in use until Close is called or the process ends.
// Unavailable: it is being checked whether the version is in use; try again.
func Install(dir string, program, member []byte) (*Installed, error) {
	sum := sha256.Sum256(slices.Concat(program, member))
	version := filepath.Join(dir, prefix+hex.EncodeToString(sum[:8]))
	lock, err := hold(version)
	if err != nil {
		return nil, fmt.Errorf("installing the shim: %w", err)
	}
	i := &Installed{filepath.Join(version, Binary), lock}
	for path, content := range map[string][]byte{i.Path: program, i.MemberPath(): member} {
		if there, err := os.ReadFile(path); err == nil && bytes.Equal(there, content) {
			continue
		}
		if err := write(path, content); err != nil {
			i.Close()
			return nil, fmt.Errorf("installing the shim: %w", err)
		}
	}
	return i, nil
}

// Close ends the use of the version.
func (i *Installed) Close() { _ = i.lock.Close() }

// attempts bounds how often a version is removed between two steps of hold.
const attempts = 10

// hold creates the directory of a version and locks it.
func hold(version string) (*os.File, error) {
	for range attempts {
		if err := os.MkdirAll(version, 0o755); err != nil { //nolint:gosec // as any directory of programs
			return nil, err
		}
		lock, err := os.OpenFile(filepath.Join(version, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
		if errors.Is(err, fs.ErrNotExist) {
			continue // it was removed just now
		}
		if err != nil {
			return nil, err
		}
		if err := flock(lock, unix.LOCK_SH); err != nil {
			_ = lock.Close()
			return nil, err
		}
		if there(lock) {
			now := time.Now()
			_ = os.Chtimes(lock.Name(), now, now) // a collector that has seen it unused begins again
			return lock, nil
		}
		_ = lock.Close()
	}
	return nil, fmt.Errorf("version %s was removed %d times meanwhile: %w", filepath.Base(version), attempts, errdefs.ErrUnavailable)
}

// flock locks a file, or returns errdefs.ErrUnavailable.
func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EWOULDBLOCK):
			return fmt.Errorf("version %s is locked: %w", filepath.Base(filepath.Dir(f.Name())), errdefs.ErrUnavailable)
		case err != nil:
			return &os.PathError{Op: "locking", Path: f.Name(), Err: err}
		}
		return nil
	}
}

// there reports whether a lock file is still that of its version.
func there(lock *os.File) bool {
	held, err := lock.Stat()
	if err != nil {
		return false
	}
	now, err := os.Stat(lock.Name())
	return err == nil && os.SameFile(held, now)
}

// write writes a program in one step.
func write(path string, program []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.Write(program)
	if err = errors.Join(err, tmp.Chmod(0o755), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), path)
}
