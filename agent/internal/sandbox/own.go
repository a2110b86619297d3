package sandbox

import (
	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// checkRecord refuses a record of another namespace or pool than the agent's own, which it reads from its Pod: the allocator and the
// controller choose agents by both, so that a sender of any other record is compromised or wrong.
func (m *Manager) checkRecord(r *agentv1.SandboxRecord) error {
	if err := m.checkNamespace(r.GetNamespace()); err != nil {
		return err
	}
	if own := m.config.Info.GetPool(); r.GetSpec().GetPool() != own {
		return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "the agent runs sandboxes of pool %q, not of %q", own, r.GetSpec().GetPool())
	}
	return nil
}

// checkNamespace refuses another namespace than the agent's own.
func (m *Manager) checkNamespace(namespace string) error {
	if own := m.config.Info.GetNamespace(); namespace != own {
		return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "the agent runs sandboxes of namespace %q, not of %q", own, namespace)
	}
	return nil
}
