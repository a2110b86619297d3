package seccomp

// Numbers is the table of system calls of an architecture.
func Numbers(goarch string) map[string]uint32 {
	a, err := archOf(goarch)
	if err != nil {
		panic(err)
	}
	return a.table()
}
