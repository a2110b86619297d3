// Package usage reads what a container uses from the kernel's files: those of its cgroup, in the legacy hierarchies or the unified one, and its
// counters of network interfaces. It keeps nothing between calls. All functions may be called concurrently.
//
// A figure that the kernel does not provide is nil: a controller may be missing, or a file in older kernels. One that cannot be read as expected is
// an error, never a wrong figure.
package usage

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// Usage is what a container uses. Counters begin with its cgroup.
type Usage struct {
	CPU    CPU
	Memory Memory
	// IO is nil if there is no controller for it.
	IO *IO
	// Network is nil if the container has no network of its own. Read leaves it nil.
	Network *Network
	PIDs    PIDs
}

// CPU is processor time.
type CPU struct {
	Total, User, System *time.Duration
	// Throttled is how long processes waited because of the limit, ThrottledPeriods in how many periods.
	Throttled        *time.Duration
	ThrottledPeriods *int64
	// LimitMillis is in thousandths of a processor; nil is none.
	LimitMillis *int64
}

// Memory is in bytes.
type Memory struct {
	// WorkingSet is Usage without the inactive page cache, which is how the kubelet computes it.
	WorkingSet, Usage, Peak *int64
	// Limit is nil if there is none.
	Limit    *int64
	OOMKills *int64
}

// IO is what was done on block devices, in bytes and operations, added up for all devices.
type IO struct{ ReadBytes, WrittenBytes, Reads, Writes int64 }

// PIDs is the number of processes and threads. Limit is nil if there is none.
type PIDs struct{ Current, Limit *int64 }

// Read reads a cgroup: path is the one below the roots of the hierarchies, which are mounted in root as in /sys/fs/cgroup. errdefs.ErrNotFound: there is
// no such cgroup.
func Read(root fs.FS, name string) (Usage, error) {
	f := files{root: root, path: strings.Trim(path.Clean("/"+name), "/")}
	_, err := fs.Stat(root, "cgroup.controllers")
	var u Usage
	if err == nil {
		u = unified(&f)
	} else {
		u = legacy(&f)
	}
	switch {
	case f.err != nil:
		return Usage{}, fmt.Errorf("reading the usage of cgroup %s: %w", name, f.err)
	case f.found == 0:
		return Usage{}, fmt.Errorf("reading the usage of cgroup %s: %w", name, errdefs.ErrNotFound)
	}
	return u, nil
}

// files reads the files of one cgroup. It keeps the first error, after which figures do not matter.
type files struct {
	root  fs.FS
	path  string
	found int // files that exist
	err   error
}

// read returns the content of a file; false if it does not exist, or ended with its cgroup.
func (f *files) read(hierarchy, file string) (string, bool) {
	raw, err := fs.ReadFile(f.root, path.Join(hierarchy, f.path, file))
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.EOPNOTSUPP):
		return "", false
	case err != nil:
		f.fail(err)
		return "", false
	}
	f.found++
	return string(raw), true
}

func (f *files) fail(err error) {
	if f.err == nil {
		f.err = err
	}
}

// number returns the number that a file has; nil if there is no file, or it has `max`.
func (f *files) number(hierarchy, file string) *int64 {
	raw, ok := f.read(hierarchy, file)
	if text := strings.TrimSpace(raw); ok && text != "max" {
		return f.parse(file, text)
	}
	return nil
}

// fields returns the lines of a file of names and numbers; nil if there is no file.
func (f *files) fields(hierarchy, file string) map[string]string {
	raw, ok := f.read(hierarchy, file)
	if !ok {
		return nil
	}
	out := map[string]string{}
	for line := range strings.Lines(raw) {
		if key, value, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			out[key] = value
		}
	}
	return out
}

// field returns one of fields; nil if it is missing.
func (f *files) field(all map[string]string, key string) *int64 {
	text, ok := all[key]
	if !ok {
		return nil
	}
	return f.parse(key, text)
}

// parse reads a number. One that is too large for its type is as large as possible: legacy limits use such numbers for none.
func (f *files) parse(name, text string) *int64 {
	n, err := number(text)
	if err != nil {
		f.fail(fmt.Errorf("%s has %q: %w", name, text, err))
		return nil
	}
	return &n
}
