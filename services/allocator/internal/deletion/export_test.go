package deletion

import (
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

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

// Of returns the deletion of a container, and whether one runs.
func (m *Manager) Of(fence *agentv1.Fence) (*Deletion, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d, ok := m.deletions[identity.FenceOf(fence)]
	return d, ok
}
