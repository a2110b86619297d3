// Package idrange gives each container of a node a range of user and group ids of its own, for its user namespace. The ranges of a node are
// shared by all agents on it.
//
// A range that is in use is a symbolic link in a directory of the node: its name is the first id, and it points to the owner and the
// container. The kernel creates a link, with where it points to, in one step or not at all, so that no two containers get the same range,
// and a killed process leaves nothing that cannot be understood.
package idrange

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Size is the number of ids in a range.
const Size = 1 << 16

// The default ranges: above those that the kubelet and /etc/subuid usually use, and below 2^31, which some programs take for negative.
const (
	DefaultFirst = 1 << 28
	DefaultCount = 1 << 14
)

// ErrExhausted means that all ranges of the node are in use.
var ErrExhausted = errors.New("all ranges of user ids on the node are in use")

// Ranges are those of a node.
type Ranges struct {
	// Dir has the ranges that are in use. It survives the programs that use it.
	Dir string
	// First is the first id of the first range, and Count the number of ranges.
	First uint32
	Count int
}

// Dir returns the directory for the ranges of a node whose slots are in slotRoot; empty if there are no slots.
func Dir(slotRoot string) string {
	if slotRoot == "" {
		return ""
	}
	return filepath.Join(slotRoot, "ids")
}

// Validate returns an error if the ranges are not within those that the kernel has, or contain ids of the host's own users.
func (r Ranges) Validate() error {
	switch end := uint64(r.First) + uint64(max(r.Count, 0))*Size; {
	case r.Count < 1:
		return fmt.Errorf("%d ranges of user ids, want at least 1", r.Count)
	case r.First < Size:
		return fmt.Errorf("user ids from %d, want at least %d: lower ones are the host's own", r.First, Size)
	case end > 1<<32-1:
		return fmt.Errorf("user ids up to %d, want at most %d", end, uint64(1<<32-1))
	}
	return nil
}

// Take takes a free range for a container, and returns its first id. The error is ErrExhausted if there is none.
func (r Ranges) Take(owner, id string) (uint32, error) {
	target, err := encode(owner, id)
	if err != nil {
		return 0, err
	}
	if err := os.MkdirAll(r.Dir, 0o700); err != nil {
		return 0, fmt.Errorf("taking a range of user ids: %w", err)
	}
	// From anywhere, so that a range that was released is not soon used again, and agents do not try the same ones.
	for start, i := rand.IntN(r.Count), 0; i < r.Count; i++ { //nolint:gosec // no secret
		first := r.First + uint32((start+i)%r.Count)*Size
		err := os.Symlink(target, r.path(first))
		if err == nil {
			return first, nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return 0, fmt.Errorf("taking a range of user ids: %w", err)
		}
	}
	return 0, ErrExhausted
}

// Release makes a range free, if the container has it. Nothing of the container may be left. Safe to repeat.
func (r Ranges) Release(first uint32, id string) error {
	path := r.path(first)
	target, err := os.Readlink(path)
	if err == nil {
		if _, has, ok := decode(target); !ok || has != id {
			return nil // it is another one's by now
		}
		err = os.Remove(path)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("releasing the user ids from %d: %w", first, err)
	}
	return nil
}

// Held is a range that is in use.
type Held struct {
	First     uint32
	Owner, ID string
	Since     time.Time
}

// List returns the ranges that are in use. Files that are no ranges are not listed.
func (r Ranges) List() ([]Held, error) {
	entries, err := os.ReadDir(r.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("listing the ranges of user ids: %w", err)
	}
	var out []Held
	for _, e := range entries {
		first, err := strconv.ParseUint(e.Name(), 10, 32)
		if err != nil {
			continue
		}
		target, err := os.Readlink(filepath.Join(r.Dir, e.Name()))
		if err != nil {
			continue // released since
		}
		info, err := e.Info()
		if err != nil {
			continue
		}
		if owner, id, ok := decode(target); ok {
			out = append(out, Held{First: uint32(first), Owner: owner, ID: id, Since: info.ModTime()})
		}
	}
	return out, nil
}

func (r Ranges) path(first uint32) string {
	return filepath.Join(r.Dir, strconv.FormatUint(uint64(first), 10))
}

func encode(owner, id string) (string, error) {
	if id == "" || strings.ContainsAny(owner+id, "/\x00") {
		return "", fmt.Errorf("taking a range of user ids for container %q of %q: invalid name", id, owner)
	}
	return owner + "/" + id, nil
}

func decode(target string) (owner, id string, ok bool) {
	owner, id, ok = strings.Cut(target, "/")
	return owner, id, ok && id != "" && !strings.Contains(id, "/")
}
