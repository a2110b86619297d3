package ctrd

// What the unit tests look at.
var (
	Belongs     = belongs
	CgroupsPath = cgroupsPath
	ValidID     = validID
)
