package sandbox

// MaxGraves is the bound of tombstones.
const MaxGraves = maxGraves

// Waiting is how many calls wait for the create of a sandbox.
func (m *Manager) Waiting(uid string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e := m.sandboxes[uid]; e != nil {
		return len(e.callers)
	}
	return 0
}
