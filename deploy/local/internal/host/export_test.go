package host

// The pure parts, for tests.
var (
	ParseStat      = parseStat
	ParseCgroups   = parseCgroups
	ParseMountinfo = parseMountinfo
	PickMounts     = pick
	SharedIn       = shared
	FindIn         = hierarchies
	HasCapIn       = hasCapability
)
