package sandbox

// Waiting returns the number of calls that wait for the create of a sandbox.
func (m *Manager) Waiting(uid string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.sandboxes[uid]; e != nil {
		return len(e.callers)
	}
	return 0
}
