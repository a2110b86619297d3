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
	e, err := m.findCreated(ctx, fence)
	if err != nil {
		return err
	}
	caller, err := callerOf(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	done, deleting, superseded := e.report.GetPersisted(), e.deletion != nil, m.leaders.check(caller)
	m.mu.Unlock()
	switch {
	case superseded != nil:
		return superseded
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
		e.change(func(r *agentv1.SandboxReport) { r.Persisted = true })
		m.config.Status.Publish(&agentv1.AgentDelta{Sandboxes: []*agentv1.SandboxReport{e.report}})
	}
	return nil
}

// Log returns the id of a sandbox's container, which names its log, and a channel that is closed once nothing more is
// written to it. It waits for a create that runs.
func (m *Manager) Log(ctx context.Context, fence *agentv1.Fence) (id string, ended <-chan struct{}, err error) {
	e, err := m.findCreated(ctx, fence)
	if err != nil {
		return "", nil, err
	}
	return e.id, e.ended, nil
}

// ForgetTombstone drops a tombstone. One that does not exist, or that a later attempt has replaced, is dropped already. It
// blocks for the disk. Safe to repeat.
func (m *Manager) ForgetTombstone(ctx context.Context, fence *agentv1.Fence) error {
	caller, err := callerOf(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	err = m.checkCall(caller, fence)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	return m.tombstones.Forget(ctx, fence, func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		e, ok := m.sandboxes[fence.GetSandboxUid()]
		return ok && e.fence.Attempt <= fence.GetAttempt()
	})
}

// findCreated returns the sandbox that the fence names, once its create has ended.
func (m *Manager) findCreated(ctx context.Context, fence *agentv1.Fence) (*entry, error) {
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
