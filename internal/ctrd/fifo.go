package ctrd

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// DefaultFIFORoot is where containerd's clients create the FIFOs of processes.
const DefaultFIFORoot = "/run/containerd/fifo"

// fifoOwner returns the container whose process has the FIFO as a standard stream; "" if there is none.
func fifoOwner(name string) string {
	for _, suffix := range []string{"-stdin", "-stdout", "-stderr"} {
		if id, ok := strings.CutSuffix(name, suffix); ok {
			return id
		}
	}
	return ""
}

// fifo is a file with the name of a FIFO.
type fifo struct{ id, path string }

// fifoDir is the directory in which containerd's clients create FIFOs; empty for none.
type fifoDir string

// list returns all FIFOs. A client creates a directory for each process, with a random name, and the streams in it.
func (d fifoDir) list() ([]fifo, error) {
	if d == "" {
		return nil, nil
	}
	dirs, err := os.ReadDir(string(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []fifo
	for _, e := range dirs {
		if !e.IsDir() {
			continue
		}
		dir := filepath.Join(string(d), e.Name())
		entries, err := os.ReadDir(dir)
		if err != nil {
			continue // removed concurrently
		}
		for _, e := range entries {
			if id := fifoOwner(e.Name()); id != "" && !e.IsDir() {
				out = append(out, fifo{id, filepath.Join(dir, e.Name())})
			}
		}
	}
	return out, nil
}

// remove removes a container's FIFOs, and the directories that are then empty.
func (d fifoDir) remove(id string) error {
	all, err := d.list()
	for _, f := range all {
		if f.id != id || err != nil {
			continue
		}
		if err = os.Remove(f.path); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		_ = os.Remove(filepath.Dir(f.path)) // fails if it is not empty
	}
	if err != nil {
		return fmt.Errorf("removing the FIFOs of container %s: %w", id, err)
	}
	return nil
}
