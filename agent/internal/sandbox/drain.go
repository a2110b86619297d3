package sandbox

import (
	"context"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// drainFile is there while the agent is drained.
	drainFile = "draining"
	// reasonDraining is what the API promises as the reason.
	reasonDraining = "Draining"
)

// Drain has the agent take no new sandboxes, or take them again, durably, and returns how many it has, creates and deletes
// that run included. Once it has returned, none is admitted. Safe to repeat. Unavailable: it could not be made durable,
// and is not in force.
func (m *Manager) Drain(ctx context.Context, agentUID string, resume bool) (int, error) {
	m.settingDrain.Lock()
	defer m.settingDrain.Unlock()
	m.mu.Lock()
	err := m.checkCall(ctx, &agentv1.Fence{AgentUid: agentUID})
	change := m.draining == resume
	m.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if change {
		if resume {
			err = m.config.State.Remove(drainFile)
		} else {
			err = m.config.State.Write(drainFile, nil)
		}
		if err != nil {
			return 0, errState(err)
		}
		logr.FromContextOrDiscard(ctx).Info("draining", "on", !resume)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.setTaking(func() { m.draining = !resume })
	m.tellPlaces()
	return len(m.sandboxes), nil
}

// errState is for what the agent could not write down.
func errState(err error) error {
	return fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent cannot keep its state on the disk")
}
