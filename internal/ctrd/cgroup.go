package ctrd

import (
	"os"
	"path/filepath"
	"strings"
)

// cgroupPath is the path of a cgroup below the hierarchies' roots, given what an OCI spec says: a path, or, for systemd,
// slice:prefix:name (`a-b.slice:fsb:u-1` is /a.slice/a-b.slice/fsb-u-1.scope).
func cgroupPath(spec string) string {
	parts := strings.Split(spec, ":")
	if len(parts) != 3 || !strings.HasSuffix(parts[0], ".slice") {
		return spec
	}
	path := "/"
	name := strings.TrimSuffix(parts[0], ".slice")
	for at := range name {
		if name[at] == '-' {
			path = filepath.Join(path, name[:at]+".slice")
		}
	}
	return filepath.Join(path, parts[0], parts[1]+"-"+parts[2]+".scope")
}

// cgroupOwner is the container that a cgroup of this name is of; "" if it is not called as ours are.
func cgroupOwner(name string) string {
	id, ok := strings.CutPrefix(name, CgroupPrefix)
	if !ok {
		return ""
	}
	return strings.TrimSuffix(id, ".scope")
}

// hierarchies are the roots of the host's cgroups: one, or, of the old kind, one for each controller.
func (r *Remover) hierarchies() []string {
	if r.CgroupRoot == "" {
		return nil
	}
	if _, err := os.Stat(filepath.Join(r.CgroupRoot, "cgroup.controllers")); err == nil {
		return []string{r.CgroupRoot}
	}
	entries, err := os.ReadDir(r.CgroupRoot)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, filepath.Join(r.CgroupRoot, e.Name()))
		}
	}
	return out
}

// cgroups are, by container, the paths below the hierarchies of all cgroups within the parents that are called as ours are.
func (r *Remover) cgroups() map[string]string {
	found := map[string]string{}
	for _, root := range r.hierarchies() {
		for _, parent := range r.CgroupParents {
			walkCgroups(root, filepath.Join("/", parent), found)
		}
	}
	return found
}

func walkCgroups(root, path string, found map[string]string) {
	entries, err := os.ReadDir(filepath.Join(root, path))
	if err != nil {
		return // it went in this moment, or this hierarchy has none
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
