package network

// The pure parts, for tests.
var (
	Conflict = conflict
	Upstream = upstream
	Rules    = rules
)
