package host

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

	"golang.org/x/sys/unix"
)

// Hierarchy is one mounted cgroup tree. A machine has one (v2), a dozen (v1), or both at once (hybrid).
type Hierarchy struct {
	Root string
	V2   bool
	// Controllers are the v1 controllers of this tree.
	Controllers []string
}

// Cgroups are all the cgroup hierarchies of the machine. A cgroup path, such as /fsb-local, means the same path in each.
type Cgroups []Hierarchy

// FindCgroups finds the mounted hierarchies.
func FindCgroups() (Cgroups, error) {
	mounts, err := Mounts()
	if err != nil {
		return nil, err
	}
	return hierarchies(mounts), nil
}

func hierarchies(mounts []Mount) Cgroups {
	var found Cgroups
	for _, mount := range mounts {
		switch mount.Type {
		case "cgroup2":
			found = append(found, Hierarchy{Root: mount.Point, V2: true})
		case "cgroup":
			controllers := slices.DeleteFunc(slices.Clone(mount.Super), func(option string) bool { return option == "rw" })
			found = append(found, Hierarchy{Root: mount.Point, Controllers: controllers})
		}
	}
	return found
}

// Create makes the cgroup in every hierarchy, able to hold processes and children, with a share of the processors when
// they are short (weight 1024 is that of one ordinary process in the root cgroup).
func (c Cgroups) Create(path string, weight int) error {
	for _, tree := range c {
		dir := filepath.Join(tree.Root, path)
		if tree.V2 {
			tree.delegate(filepath.Dir(dir))
		}
		if err := os.MkdirAll(dir, 0o750); err != nil {
			return fmt.Errorf("making cgroup %s: %w", dir, err)
		}
		if err := tree.tune(dir, weight); err != nil {
			return err
		}
	}
	return nil
}

// delegate hands every controller of a v2 cgroup on to its children. A controller that refuses is one that the host
// does not let us have; the kubelet names it if it needs it.
func (h Hierarchy) delegate(dir string) {
	raw, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return
	}
	for _, controller := range strings.Fields(string(raw)) {
		_ = os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+controller), 0o600)
	}
}

func (h Hierarchy) tune(dir string, weight int) error {
	set := func(file, value string) error {
		err := os.WriteFile(filepath.Join(dir, file), []byte(value), 0o600)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			return fmt.Errorf("setting %s of cgroup %s: %w", file, dir, err)
		}
		return nil
	}
	switch {
	case h.V2:
		// cgroup.weight runs from 1 to 10000 around 100, cpu.shares from 2 around 1024.
		return set("cpu.weight", strconv.Itoa(min(max(weight*100/1024, 1), 10000)))
	case slices.Contains(h.Controllers, "cpu"):
		return set("cpu.shares", strconv.Itoa(weight))
	case slices.Contains(h.Controllers, "cpuset"):
		// A v1 cpuset starts empty and takes no process until it has processors and memory nodes.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			parent, err := os.ReadFile(filepath.Join(filepath.Dir(dir), file))
			if err != nil {
				return fmt.Errorf("reading the parent of cgroup %s: %w", dir, err)
			}
			if err := set(file, strings.TrimSpace(string(parent))); err != nil {
				return err
			}
		}
	}
	return nil
}

// Enter moves the calling process into the cgroup; the children it starts from then on are born there.
func (c Cgroups) Enter(path string) error {
	for _, tree := range c {
		file := filepath.Join(tree.Root, path, "cgroup.procs")
		if err := os.WriteFile(file, []byte(strconv.Itoa(os.Getpid())), 0o600); err != nil {
			return fmt.Errorf("entering cgroup: %w", err)
		}
	}
	return nil
}

// Remove removes the cgroup and everything below it, in every hierarchy. Its processes must be dead; it waits, while
// ctx lasts, for the kernel to notice.
func (c Cgroups) Remove(ctx context.Context, path string) error {
	return Poll(ctx, 20*time.Millisecond, func(context.Context) error {
		var failed error
		for _, tree := range c {
			failed = errors.Join(failed, removeTree(filepath.Join(tree.Root, path)))
		}
		return failed
	})
}

// removeTree removes cgroup directories, children first. Their files go with them.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("listing cgroup: %w", err)
	}
	var failed error
	for _, entry := range entries {
		if entry.IsDir() {
			failed = errors.Join(failed, removeTree(filepath.Join(dir, entry.Name())))
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		failed = errors.Join(failed, fmt.Errorf("removing cgroup %s: %w", dir, err))
	}
	return failed
}

// Thaw lets frozen processes of the cgroups and of all below them run again, so that they can die. In v2 even a frozen
// process can be killed.
func (c Cgroups) Thaw(paths ...string) {
	for _, tree := range c {
		if !slices.Contains(tree.Controllers, "freezer") {
			continue
		}
		for _, path := range paths {
			_ = filepath.WalkDir(filepath.Join(tree.Root, path), func(dir string, entry fs.DirEntry, err error) error {
				if err == nil && entry.IsDir() {
					_ = os.WriteFile(filepath.Join(dir, "freezer.state"), []byte("THAWED"), 0o600)
				}
				return nil
			})
		}
	}
}
