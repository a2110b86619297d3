package sandbox

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// DropVanished deletes the sandboxes whose processes have ended and whose containers somebody else has removed, as a node's
// janitor removes those whose Sandbox is gone: nobody else would ever ask for that, and each would hold its place for good.
// It asks the runtime only if a process has ended.
func (m *Manager) DropVanished(ctx context.Context) error {
	ended := m.endedSandboxes()
	if len(ended) == 0 {
		return nil
	}
	found, err := m.config.Runtime.List(ctx, map[string]string{
		identity.KeyManaged: "true", identity.KeyAgentUID: m.config.Info.GetPodUid(),
	})
	if err != nil {
		return fmt.Errorf("looking for containers that were removed: %w", err)
	}
	there := make(map[string]bool, len(found))
	for _, f := range found {
		there[f.ID] = true
	}
	log := logr.FromContextOrDiscard(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range ended {
		// Of this entry, once it has ended, there was a container before the runtime was asked, and will be none again.
		if there[e.id] || e.deletion != nil || m.closed || m.sandboxes[e.record.GetFence().GetSandboxUid()] != e {
			continue
		}
		log.Info("deleting a sandbox whose container was removed", "sandbox", e.record.GetNamespace()+"/"+e.record.GetName(), "container", e.id)
		m.startDelete(ctx, e, durationpb.New(0))
	}
	return nil
}

// endedSandboxes are the entries whose processes have ended and that nobody deletes.
func (m *Manager) endedSandboxes() []*entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	var ended []*entry
	for _, e := range m.sandboxes {
		if m.adopted && e.deletion == nil && isClosed(e.ended) {
			ended = append(ended, e)
		}
	}
	return ended
}
