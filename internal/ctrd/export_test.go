package ctrd

import "context"

// Internals under test.
var (
	Belongs  = belongs
	IsShimOf = isShimOf
	ValidID  = validID

	ExpandCgroup = cgroupPath
	Unescape     = unescape
	PodOf        = podOf
)

// CgroupsPath returns the cgroup that a spec names.
func CgroupsPath(raw []byte) string { return parseSpec(raw).Linux.CgroupsPath }

// RemoveLog removes a log directory.
func (r *Remover) RemoveLog(id string) error { return r.logs().remove(id) }

// Unmount detaches a container's mounts.
func (r *Remover) Unmount(ctx context.Context, id string) error { return r.unmount(ctx, id) }

// RemoveFIFOs removes a container's FIFOs.
func (r *Remover) RemoveFIFOs(id string) error { return fifoDir(r.FIFORoot).remove(id) }
