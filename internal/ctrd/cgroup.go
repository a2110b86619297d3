package ctrd

import (
	"os"
	"path/filepath"
	"strings"
)

// cgroupPath returns the path of a cgroup below the hierarchies' roots, given the OCI spec's value: a path, or, for systemd,
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

// cgroupOwner returns the container of a cgroup with this name; "" if the name is not one of ours.
func cgroupOwner(name string) string {
	id, ok := strings.CutPrefix(name, CgroupPrefix)
	if !ok {
		return ""
	}
	return strings.TrimSuffix(id, ".scope")
}

// hierarchies returns the roots of the host's cgroups: one with cgroup v2, one for each controller with v1.
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

// cgroups returns, by container, the paths below the hierarchies' roots of all our cgroups within the parents.
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
