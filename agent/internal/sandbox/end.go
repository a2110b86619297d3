package sandbox

import (
	"context"
	"fmt"
	"syscall"

	"github.com/containerd/errdefs"
)

// ending is why the agent ended a process by itself.
type ending struct{ reason, message string }

// Running returns the ids of the containers whose processes run and that are not being deleted.
func (m *Manager) Running() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ids []string
	for _, e := range m.sandboxes {
		if e.runs() {
			ids = append(ids, e.id)
		}
	}
	return ids
}

// End kills the processes of a container for a reason, which its report then has. A container whose process does not run is no
// error. Safe to repeat.
func (m *Manager) End(ctx context.Context, id, reason, message string) error {
	m.mu.Lock()
	var found *entry
	for _, e := range m.sandboxes {
		if e.id == id && e.runs() {
			found = e
		}
	}
	if found != nil {
		found.ending = &ending{reason, message}
	}
	m.mu.Unlock()
	if found == nil {
		return nil
	}
	if err := m.config.Runtime.Signal(ctx, id, syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("killing container %s: %w", id, err)
	}
	return nil
}

// runs reports whether the process was started, has not ended, and is not being ended by a delete. mu is held.
func (e *entry) runs() bool {
	return isClosed(e.created) && e.createErr == nil && e.deletion == nil && !isClosed(e.ended)
}
