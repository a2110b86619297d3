package deletion

// Acknowledged reports whether the deletion is durable as it stands.
func (d *Deletion) Acknowledged() bool {
	acknowledged, _ := d.progress()
	return acknowledged
}

// Kept reports whether the agent has the tombstone.
func (d *Deletion) Kept() bool {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.kept
}
