package ctrd

import (
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

// CgroupPrefix begins the name of every sandbox's cgroup, which ends in the container's id.
const CgroupPrefix = node.CgroupPrefix

// ShimCgroup is the name of the cgroup, in that of an agent's Pod, with the shims of its containers. It goes with the Pod.
const ShimCgroup = "shims"

// cgroupOwner returns the container of a cgroup with this name; "" if the name is not one of ours.
func cgroupOwner(name string) string {
	id, ok := strings.CutPrefix(name, CgroupPrefix)
	if !ok {
		return ""
	}
	return strings.TrimSuffix(id, ".scope")
}

// cgroups finds and removes the cgroups of our containers on the host.
type cgroups struct {
	// root is where cgroups are mounted (`/sys/fs/cgroup`); empty for none.
	root string
	// parents are the paths below the hierarchies' roots in which all looks for cgroups.
	parents []string
}

// hierarchies returns the roots of the host's cgroups: one with cgroup v2, one for each controller with v1.
func (c cgroups) hierarchies() []string {
	if c.root == "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(c.root, "cgroup.controllers")); err == nil {
		return []string{c.root}
	}
	entries, err := os.ReadDir(c.root)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, filepath.Join(c.root, e.Name()))
		}
	}
	return out
}

// all returns, by container, the paths below the hierarchies' roots of all our cgroups within the parents.
func (c cgroups) all() map[string]string {
	found := map[string]string{}
	for _, root := range c.hierarchies() {
		for _, parent := range c.parents {
			walkCgroups(root, filepath.Join("/", parent), found)
		}
	}
	return found
}

func walkCgroups(root, path string, found map[string]string) {
	entries, err := os.ReadDir(filepath.Join(root, path))
	if err != nil {
		return // removed concurrently, or not in this hierarchy
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		inner := filepath.Join(path, e.Name())
		if id := cgroupOwner(e.Name()); ours(id) {
			found[id] = inner
			continue
		}
		walkCgroups(root, inner, found)
	}
}

// members returns the processes in a container's cgroup.
func (c cgroups) members(path string) []stray {
	var found []stray
	for _, dir := range c.dirs(path) {
		raw, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			continue
		}
		for _, f := range strings.Fields(string(raw)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 1 {
				found = append(found, stray{pid: pid})
			}
		}
	}
	return found
}

// remove removes what the OCI runtime may have left of a cgroup, in every hierarchy. The kernel removes only empty cgroups,
// so no process is affected. A cgroup that is not visible here is skipped.
func (c cgroups) remove(path string) {
	for _, dir := range c.dirs(path) {
		_ = syscall.Rmdir(dir)
	}
}

// exists reports whether a cgroup exists in any hierarchy.
func (c cgroups) exists(path string) bool { return len(c.dirs(path)) > 0 }

// dirs returns the existing directories of a sandbox's cgroup: one with cgroup v2, one for each controller with v1. Only
// a cgroup with our prefix is considered.
func (c cgroups) dirs(path string) []string {
	if c.root == "" || !strings.HasPrefix(path, "/") || !strings.HasPrefix(filepath.Base(path), CgroupPrefix) {
		return nil
	}
	var dirs []string
	for _, root := range c.hierarchies() {
		dir := filepath.Join(root, path)
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// free returns our cgroups that are empty, or whose processes belong to a task of this containerd.
func (c cgroups) free(wanted func(id string) bool, tasks func() (map[string]bool, error)) ([]Piece, error) {
	all := c.all()
	maps.DeleteFunc(all, func(id, _ string) bool { return !wanted(id) })
	if len(all) == 0 {
		return nil, nil
	}
	known, err := tasks()
	if err != nil {
		return nil, err
	}
	var out []Piece
	for id, path := range all {
		if known[id] || len(c.members(path)) == 0 {
			out = append(out, Piece{ID: id, Part: PartCgroup, Path: path, Owner: podOf(path)})
		}
	}
	return out, nil
}
