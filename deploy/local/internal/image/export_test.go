package image

// The pure parts, for tests.
var (
	Codename = codename
	Filter   = filter
)
