package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files/wire"
)

// defaultMode and defaultDirMode are the permissions of what is made.
const (
	defaultMode    = 0o644
	defaultDirMode = 0o755
)

func (s *server) makeDir() (*wire.Result, error) {
	mode := uint32(defaultDirMode)
	if s.call.Mode != nil {
		mode = *s.call.Mode
	}
	if st, err := os.Stat(s.path); err == nil && st.IsDir() {
		return described(s.path, true)
	}
	if err := makeAll(s.path, mode); err != nil {
		return nil, err
	}
	result, err := described(s.path, true)
	if result != nil {
		result.Made = true
	}
	return result, err
}

// makeAll makes a directory with its parents, whatever the umask.
func makeAll(path string, mode uint32) error {
	var missing []string
	for p := path; ; p = filepath.Dir(p) {
		st, err := os.Stat(p)
		if err == nil {
			if !st.IsDir() {
				return &fs.PathError{Op: "mkdir", Path: p, Err: unix.ENOTDIR}
			}
			break
		}
		if !errors.Is(err, fs.ErrNotExist) || p == "/" {
			return err
		}
		missing = append(missing, p)
	}
	for i := len(missing) - 1; i >= 0; i-- {
		if err := unix.Mkdir(missing[i], mode); err != nil && err != unix.EEXIST {
			return &fs.PathError{Op: "mkdir", Path: missing[i], Err: err}
		}
		if err := unix.Chmod(missing[i], mode); err != nil {
			return &fs.PathError{Op: "chmod", Path: missing[i], Err: err}
		}
	}
	return nil
}

func (s *server) move() (*wire.Result, error) {
	to, err := s.clean(s.call.NewPath)
	if err != nil {
		return nil, err
	}
	flags := uint(0)
	if s.call.NoReplace {
		flags = unix.RENAME_NOREPLACE
	}
	if err := unix.Renameat2(unix.AT_FDCWD, s.path, unix.AT_FDCWD, to, flags); err != nil {
		return nil, &fs.PathError{Op: "rename", Path: s.path, Err: err}
	}
	return described(to, false)
}

func (s *server) remove() (*wire.Result, error) {
	if s.path == "/" {
		return nil, &fs.PathError{Op: "remove", Path: s.path, Err: unix.EBUSY}
	}
	_, err := os.Lstat(s.path)
	switch {
	case err != nil && errors.Is(err, fs.ErrNotExist) && s.call.MissingOK:
		return &wire.Result{}, nil
	case err != nil:
		return nil, err
	case s.call.Recursive:
		err = os.RemoveAll(s.path)
	default:
		err = os.Remove(s.path)
	}
	if err != nil {
		return nil, err
	}
	return &wire.Result{}, nil
}
