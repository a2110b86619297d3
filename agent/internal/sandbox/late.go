package sandbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-logr/logr"

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
	var late []string
	m.mu.Lock()
	if m.gate.adopted && !m.gate.closed {
		held := m.sandboxes.containers()
		for _, f := range found {
			// What Adopt took over has an entry, and what this process makes has its label.
			if f.Labels[identity.KeyAgentProcess] != m.config.Process && !held[f.ID] {
				late = append(late, f.ID)
			}
		}
	}
	m.mu.Unlock()
	var failed []error
	for _, id := range late {
		logr.FromContextOrDiscard(ctx).Info("removing container that an earlier agent process had asked for", obs.KeyContainer, id)
		if err := m.launcher.Remove(ctx, id); err != nil {
			failed = append(failed, fmt.Errorf("removing container %s: %w", id, err))
		}
	}
	return errors.Join(failed...)
}
