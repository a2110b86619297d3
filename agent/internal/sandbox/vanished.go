package sandbox

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// DropVanished deletes the sandboxes whose processes have ended and whose containers another component has removed, as the
// node's janitor removes those whose Sandbox is gone: no caller would ever delete them. It asks the runtime only if a process
// has ended.
func (m *Manager) DropVanished(ctx context.Context) error {
	m.mu.Lock()
	adopted, ended := m.gate.adopted, m.sandboxes.ended()
	m.mu.Unlock()
	if !adopted || len(ended) == 0 {
		return nil
	}
	found, err := m.config.Runtime.List(ctx, ownLabels(m.config.Info.GetPodUid()))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	exists := make(map[string]bool, len(found))
	for _, f := range found {
		exists[f.ID] = true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range ended {
		// The entry's container existed before the runtime was asked, and no other container will ever have its id.
		if exists[e.id] || e.deletion != nil || m.gate.closed || m.sandboxes[e.fence.SandboxUID] != e {
			continue
		}
		logr.FromContextOrDiscard(ctx).Info("deleting sandbox whose container was removed", obs.KeySandbox, e.name(), obs.KeyContainer, e.id)
		m.startDelete(ctx, e, nil)
	}
	return nil
}

// ownLabels selects the containers of an agent.
func ownLabels(agentUID string) map[string]string {
	return map[string]string{identity.KeyManaged: "true", identity.KeyAgentUID: agentUID}
}
