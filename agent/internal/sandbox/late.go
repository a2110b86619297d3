package sandbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// RemoveLate removes the containers of earlier processes of this agent that Adopt did not see: containerd completes what a
// process asked for also after that process was killed. None of them was acknowledged, because no process received the answer.
// It returns the errors of all removals.
func (m *Manager) RemoveLate(ctx context.Context) error {
	found, err := m.config.Runtime.List(ctx, ownLabels(m.config.Info.GetPodUid()))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	var failed []error
	for _, f := range found {
		done, late := m.beginRemovingLate(f)
		if !late {
			continue
		}
		logr.FromContextOrDiscard(ctx).Info("removing container that an earlier agent process had asked for", obs.KeyContainer, f.ID)
		if err := m.launcher.Remove(ctx, f.ID); err != nil {
			failed = append(failed, fmt.Errorf("removing container %s: %w", f.ID, err))
		}
		done()
	}
	return errors.Join(failed...)
}

// beginRemovingLate reports whether a container is to be removed. Until done is called, creates with its id wait.
func (m *Manager) beginRemovingLate(f runtime.Found) (done func(), late bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	// What Adopt took over has an entry, and what this process makes has its label.
	if !m.gate.adopted || m.gate.closed || f.Labels[identity.KeyAgentProcess] == m.config.Process || m.sandboxes.holdsContainer(f.ID) {
		return nil, false
	}
	gone := make(chan struct{})
	m.removingLate[f.ID] = gone
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.removingLate, f.ID)
		close(gone)
	}, true
}
