package ctrd

import (
	"context"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/v2/core/content"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd/node"
)

// Internals under test.
var (
	ValidID = validID

	ExpandCgroup = node.CgroupPath
	Unescape     = unescape
	PodOf        = podOf
	Documents    = func(s content.Store) content.Store { return documents{s} }
)

// Belongs reports whether a command line whose program is not hidden belongs to a container, and whether it is removing it.
func Belongs(line, namespace, id string) (ours, wait bool) {
	return commandOf(line).belongs(namespace, id)
}

// IsShimOf reports whether such a command line is that of a group's shim.
func IsShimOf(line, namespace, group string) bool { return commandOf(line).isShimOf(namespace, group) }

func commandOf(line string) command {
	args := strings.Split(line, " ")
	return command{program: filepath.Base(args[0]), args: args}
}

// Strays returns a container's processes.
func Strays(procRoot, namespace, id string) []int {
	var out []int
	for _, s := range (processes{procRoot, namespace}).strays(id) {
		out = append(out, s.pid)
	}
	return out
}

// Shims returns the shims that were started with a container.
func Shims(procRoot, namespace, id string) []int { return processes{procRoot, namespace}.shims(id) }

// CgroupsPath returns the cgroup that a spec names.
func CgroupsPath(raw []byte) string { return parseSpec(raw).Linux.CgroupsPath }

// RemoveLog removes a log directory.
func (r *Remover) RemoveLog(id string) error { return r.logs().remove(id) }

// Unmount detaches a container's mounts.
func (r *Remover) Unmount(ctx context.Context, id string) error { return r.unmount(ctx, id) }

// RemoveFIFOs removes a container's FIFOs.
func (r *Remover) RemoveFIFOs(id string) error { return fifoDir(r.FIFORoot).remove(id) }

// MountPoint is a mount point in a container's bundle.
type MountPoint struct{ ID, Path string }

// MountPoints returns the mount points in the bundles of a directory.
func MountPoints(proc, dir string) ([]MountPoint, error) {
	points, err := bundles{dir: dir, proc: proc}.mountPoints(func(string) bool { return true })
	out := make([]MountPoint, 0, len(points))
	for _, p := range points {
		out = append(out, MountPoint{p.id, p.path})
	}
	return out, err
}
