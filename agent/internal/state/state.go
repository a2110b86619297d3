// Package state keeps small files that outlive the agent's process. Its directory is an emptyDir of the agent's Pod and lives
// as long as the Pod. A file exists completely or not at all, and is on the disk once a call has returned. The package never
// interprets the files. All methods may be called concurrently; callers that need an order of calls on one file keep it
// themselves.
package state

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// tempPrefix begins the names of files that are being written. Open removes those that an earlier process left.
const tempPrefix = ".new-"

// Dir is a state directory. Make it with Open.
type Dir struct{ path string }

// Open creates the directory, if it does not exist, and removes files that were not completely written.
func Open(path string) (*Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("creating the state directory: %w", err)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("reading the state directory: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			if err := os.Remove(filepath.Join(path, e.Name())); err != nil {
				return nil, fmt.Errorf("removing an incomplete file: %w", err)
			}
		}
	}
	return &Dir{path}, nil
}

// Sub opens a directory within this one.
func (d *Dir) Sub(name string) (*Dir, error) {
	if err := check(name); err != nil {
		return nil, err
	}
	path := filepath.Join(d.path, name)
	if err := os.Mkdir(path, 0o700); err == nil {
		err = d.sync()
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("creating the state directory: %w", err)
	}
	return Open(path)
}

// Write creates a file, or replaces it. It blocks for the disk. After an error the file is unchanged, unless only the
// directory could not be synced: then it may be either.
func (d *Dir) Write(name string, data []byte) error {
	if err := check(name); err != nil {
		return err
	}
	f, err := os.CreateTemp(d.path, tempPrefix)
	if err != nil {
		return fmt.Errorf("writing state %s: %w", name, err)
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), filepath.Join(d.path, name))
	}
	if err != nil {
		_ = os.Remove(f.Name())
		return fmt.Errorf("writing state %s: %w", name, err)
	}
	return d.sync()
}

// Remove removes a file. It blocks for the disk. Safe to repeat.
func (d *Dir) Remove(name string) error {
	if err := check(name); err != nil {
		return err
	}
	if err := os.Remove(filepath.Join(d.path, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing state %s: %w", name, err)
	}
	return d.sync()
}

// Read returns a file, or nil without an error if it does not exist.
func (d *Dir) Read(name string) ([]byte, error) {
	if err := check(name); err != nil {
		return nil, err
	}
	data, err := os.ReadFile(filepath.Join(d.path, name))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading state %s: %w", name, err)
	case data == nil:
		return []byte{}, nil
	}
	return data, nil
}

// Names returns the names of all files, sorted.
func (d *Dir) Names() ([]string, error) {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return nil, fmt.Errorf("reading the state directory: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.Type().IsRegular() && !strings.HasPrefix(e.Name(), tempPrefix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// sync makes the directory's entries durable.
func (d *Dir) sync() error {
	f, err := os.Open(d.path)
	if err != nil {
		return fmt.Errorf("syncing the state directory: %w", err)
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return fmt.Errorf("syncing the state directory: %w", err)
	}
	return nil
}

// check refuses names that are not plain file names.
func check(name string) error {
	if name == "" || strings.HasPrefix(name, ".") || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("invalid name of a state file %q: %w", name, fs.ErrInvalid)
	}
	return nil
}
