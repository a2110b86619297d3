package registry

// Spaces returns the number of namespaces of which something is known.
func (r *Registry) Spaces() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.spaces)
}
