// Package cgroup makes, limits, freezes, reads and removes the cgroups of containers, in the legacy hierarchies or the unified one. Paths
// are those below the hierarchies' roots. A Tree has no state and may be used concurrently, also for one cgroup, except that Remove must
// not run beside Create or Attach for the same one.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/cgroups/v3/cgroup2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Unified reports whether the host has only the unified hierarchy.
func Unified() bool { return isUnified("/sys/fs/cgroup") }

func isUnified(root string) bool {
	var fs unix.Statfs_t
	if err := unix.Statfs(root, &fs); err == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC {
		return true
	}
	_, err := os.Stat(filepath.Join(root, "cgroup.controllers"))
	return err == nil
}

// Tree is where the cgroups of the host are mounted.
type Tree struct {
	root    string
	unified bool
	// hierarchies are the mount points of the legacy hierarchies, each once, sorted; with the unified one the root alone.
	hierarchies []string
}

// Open finds the hierarchies below a directory, such as /sys/fs/cgroup.
func Open(root string) (*Tree, error) {
	if isUnified(root) {
		return &Tree{root: root, unified: true, hierarchies: []string{root}}, nil
	}
	entries, err := os.ReadDir(root)
	if err != nil {
		return nil, fmt.Errorf("looking for cgroups: %w", err)
	}
	t := &Tree{root: root}
	for _, e := range entries {
		dir := filepath.Join(root, e.Name())
		var fs unix.Statfs_t
		if e.IsDir() && unix.Statfs(dir, &fs) == nil && fs.Type == unix.CGROUP_SUPER_MAGIC { // links name controllers that are mounted together
			t.hierarchies = append(t.hierarchies, dir)
		}
	}
	if len(t.hierarchies) == 0 {
		return nil, fmt.Errorf("looking for cgroups: %s has none", root)
	}
	return t, nil
}

// Unified reports whether there is only the unified hierarchy.
func (t *Tree) Unified() bool { return t.unified }

// Create makes a cgroup and its missing parents, in all hierarchies, with its limits and the access to devices that every container has. If
// it fails, the caller removes what it has made.
func (t *Tree) Create(path string, r *specs.LinuxResources) error {
	if t.unified {
		// The kernel wants a program for the access to devices.
		if _, err := cgroup2.NewManager(t.root, path, &cgroup2.Resources{Devices: devices2()}); err != nil {
			return fmt.Errorf("making cgroup %s: %w", path, err)
		}
	} else if err := t.create1(path); err != nil {
		return fmt.Errorf("making cgroup %s: %w", path, err)
	}
	if r == nil {
		return nil
	}
	return t.Limit(path, r)
}

func (t *Tree) create1(path string) error {
	for _, h := range t.hierarchies {
		if err := os.MkdirAll(filepath.Join(h, path), 0o755); err != nil { //nolint:gosec // as all cgroups
			return err
		}
	}
	if err := t.copyCPUSet(path); err != nil {
		return err
	}
	return t.limitDevices(path)
}

// copyCPUSet gives a cgroup and its parents the processors and memory nodes of what is above: they have none at first, and then take no
// process.
func (t *Tree) copyCPUSet(path string) error {
	root := filepath.Join(t.root, "cpuset")
	if !slices.Contains(t.hierarchies, root) {
		return nil
	}
	dir := root
	for _, part := range strings.Split(strings.Trim(path, "/"), "/") {
		above := dir
		dir = filepath.Join(dir, part)
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			now, err := os.ReadFile(filepath.Join(dir, file))
			if err != nil {
				return err
			}
			if len(strings.TrimSpace(string(now))) > 0 {
				continue
			}
			from, err := os.ReadFile(filepath.Join(above, file))
			if err != nil {
				return err
			}
			if err := write(filepath.Join(dir, file), strings.TrimSpace(string(from))); err != nil {
				return err
			}
		}
	}
	return nil
}

// AttachShares moves a process into a cgroup as far as processor time is concerned: with the legacy hierarchies in that of cpu alone.
func (t *Tree) AttachShares(path string, pid int) error {
	dir := filepath.Join(t.root, "cpu", path)
	if t.unified {
		dir = filepath.Join(t.root, path)
	}
	if err := write(filepath.Join(dir, "cgroup.procs"), strconv.Itoa(pid)); err != nil {
		return fmt.Errorf("attaching process %d to cgroup %s: %w", pid, path, err)
	}
	return nil
}

// Entrance is how a new process comes into a cgroup.
type Entrance struct {
	// Dir is the cgroup's directory, in which the kernel can start a process; nil with the legacy hierarchies.
	Dir *os.File
	// Tasks has the file of each legacy hierarchy to which a thread writes 0 to enter the cgroup.
	Tasks []*os.File
}

// Entrance opens the entrance of a cgroup.
func (t *Tree) Entrance(path string) (_ *Entrance, err error) {
	e := &Entrance{}
	defer func() {
		if err != nil {
			e.Close()
		}
	}()
	if t.unified {
		e.Dir, err = os.OpenFile(filepath.Join(t.root, path), unix.O_DIRECTORY|unix.O_RDONLY, 0)
		return e, err
	}
	for _, h := range t.hierarchies {
		f, err := os.OpenFile(filepath.Join(h, path, "tasks"), os.O_WRONLY, 0)
		if err != nil {
			return nil, err
		}
		e.Tasks = append(e.Tasks, f)
	}
	return e, nil
}

// Close closes it.
func (e *Entrance) Close() {
	if e.Dir != nil {
		_ = e.Dir.Close()
	}
	for _, f := range e.Tasks {
		_ = f.Close()
	}
}

// Pids returns the processes of a cgroup and of those below it; none if it does not exist.
func (t *Tree) Pids(path string) ([]int, error) {
	var pids []int
	dir := filepath.Join(t.main(), path)
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil || !d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(filepath.Join(name, "cgroup.procs"))
		if err != nil {
			if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
				return nil
			}
			return err
		}
		for f := range strings.FieldsSeq(string(raw)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing the processes of cgroup %s: %w", path, err)
	}
	return pids, nil
}

// main is the hierarchy that is asked for the processes: every process is in a cgroup of it.
func (t *Tree) main() string {
	for _, name := range []string{"pids", "freezer"} {
		if dir := filepath.Join(t.root, name); slices.Contains(t.hierarchies, dir) {
			return dir
		}
	}
	return t.hierarchies[0]
}

// killRounds is how often Signal looks for processes that it has not killed yet. All rounds take 5 s: on a machine without an idle processor, it
// takes that long until those that were killed have ended.
const killRounds = 300

// Signal sends a signal to all processes of a cgroup. With SIGKILL none is left that was in it when the call began, nor any that these have
// started meanwhile.
func (t *Tree) Signal(path string, sig unix.Signal) error {
	if sig == unix.SIGKILL && t.unified {
		err := write(filepath.Join(t.root, path, "cgroup.kill"), "1")
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if sig == unix.SIGKILL {
		_ = t.Thaw(path)
	}
	// Each round kills what the one before has missed because it was just being started.
	for round := range killRounds {
		pids, err := t.Pids(path)
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("signaling process %d of cgroup %s: %w", pid, path, err)
			}
		}
		if sig != unix.SIGKILL {
			return nil
		}
		<-time.After(time.Millisecond * time.Duration(1+round/10))
	}
	return fmt.Errorf("killing the processes of cgroup %s: some are left", path)
}

// Thaw lets the processes of a cgroup end: one of a legacy cgroup that is frozen does not even end when it is killed.
func (t *Tree) Thaw(path string) error {
	if t.unified {
		return nil
	}
	err := write(filepath.Join(t.root, "freezer", path, "freezer.state"), "THAWED")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// freezePoll is the interval at which the state of a cgroup that is being frozen is read.
const freezePoll = 2 * time.Millisecond

// Freeze stops all processes of a cgroup, or lets them go on, and waits until they have stopped.
func (t *Tree) Freeze(ctx context.Context, path string, stop bool) error {
	file, want := filepath.Join(t.root, "freezer", path, "freezer.state"), "THAWED"
	if stop {
		want = "FROZEN"
	}
	value, state := want, file
	if t.unified {
		file, value, state, want = filepath.Join(t.root, path, "cgroup.freeze"), "0", filepath.Join(t.root, path, "cgroup.events"), "frozen 0"
		if stop {
			value, want = "1", "frozen 1"
		}
	}
	for {
		if err := write(file, value); err != nil { // a legacy freezer that still freezes tries again
			return fmt.Errorf("freezing cgroup %s: %w", path, err)
		}
		raw, err := os.ReadFile(state)
		if err != nil {
			return fmt.Errorf("freezing cgroup %s: %w", path, err)
		}
		if slices.Contains(strings.Split(strings.TrimSpace(string(raw)), "\n"), want) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("freezing cgroup %s: %w", path, ctx.Err())
		case <-time.After(freezePoll):
		}
	}
}

// Remove removes an empty cgroup and what is below it. One that does not exist is removed already.
func (t *Tree) Remove(path string) error {
	var errs []error
	for _, h := range t.hierarchies {
		if err := removeAll(filepath.Join(h, path)); err != nil {
			errs = append(errs, fmt.Errorf("removing cgroup %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

func removeAll(dir string) error {
	err := unix.Rmdir(dir)
	if !errors.Is(err, unix.EBUSY) {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	entries, readErr := os.ReadDir(dir)
	if readErr != nil {
		return readErr
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeAll(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	// A process that has just ended may be in it for a moment.
	for range 50 {
		if err = unix.Rmdir(dir); !errors.Is(err, unix.EBUSY) {
			break
		}
		<-time.After(time.Millisecond)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

func write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
