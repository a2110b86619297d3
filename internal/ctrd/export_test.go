package ctrd

// What the unit tests look at.
var (
	Belongs  = belongs
	IsShimOf = isShimOf
	ValidID  = validID
)

// CgroupsPath is the cgroup that a spec names.
func CgroupsPath(raw []byte) string { return parseSpec(raw).Linux.CgroupsPath }

// RemoveLog removes a log directory.
func (r *Remover) RemoveLog(id string) error { return r.removeLog(id) }
