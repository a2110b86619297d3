package sandbox

import (
	"context"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// MarkPersisted notes, durably, that the sandbox's custom resource is written. It waits for a create that runs. Safe to
// repeat. NotFound, FenceMismatch and Aborted (being deleted) as for every call.
func (m *Manager) MarkPersisted(ctx context.Context, fence *agentv1.Fence) error {
	e, err := m.settled(ctx, fence)
	if err != nil {
		return err
	}
	caller, err := callerOf(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	done, deleting, deposed := e.report.GetPersisted(), e.deletion != nil, m.inForce(caller)
	m.mu.Unlock()
	switch {
	case deposed != nil:
		return deposed
	case deleting:
		return errTerminating(fence)
	case done:
		return nil
	}
	err = m.config.Runtime.SetLabel(ctx, e.id, identity.KeyPersisted, "true")
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if isClosed(e.gone) || err != nil {
		return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s is gone", fence.GetSandboxUid())
	}
	if !e.report.GetPersisted() {
		m.set(e, func(r *agentv1.SandboxReport) { r.Persisted = true })
	}
	return nil
}

// Log finds a sandbox's log: the container's id, and a channel that is closed once nothing more is written. It waits for
// a create that runs.
func (m *Manager) Log(ctx context.Context, fence *agentv1.Fence) (string, <-chan struct{}, error) {
	e, err := m.settled(ctx, fence)
	if err != nil {
		return "", nil, err
	}
	return e.id, e.ended, nil
}

// settled returns the sandbox that the fence names, once its create has ended.
func (m *Manager) settled(ctx context.Context, fence *agentv1.Fence) (*entry, error) {
	m.mu.Lock()
	e, err := m.find(fence)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case <-e.created:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.createErr != nil {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "sandbox %s was not created", fence.GetSandboxUid())
	}
	return e, nil
}
