package ctrd

// What the unit tests look at.
var (
	Belongs     = belongs
	CgroupsPath = cgroupsPath
	ValidID     = validID
)

// RemoveLog removes a log directory.
func (r *Remover) RemoveLog(id string) error { return r.removeLog(id) }
