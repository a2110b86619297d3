package observe

// What the unit tests look at.
var (
	Read        = read
	ContainerOf = containerOf
)
