package observe

// Exported for tests.
var (
	Read        = read
	ContainerOf = containerOf
)
