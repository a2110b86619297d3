package sandbox

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Supersede says that a kind of leader has a new term. Calls of lower terms are refused from here on, also those that
// were let in and wait, and creates that only such calls wait for are cancelled and undone, unless they have started.
//
// The fence alone would not be enough. A create may be under way for minutes (the pull of its image), and a deposed leader
// that is only cut off, not dead, would go on to wait for it and tell its client that the sandbox runs, after the new one
// may have answered the same client's retry on another agent. As it is, once a call under the new term was answered,
// every sandbox of the older leader's is RUNNING, and was reported so, or will never run: the new leader need not
// guess. Nothing is lost, for nobody was told of a sandbox that had not started, and whoever leads begins it anew.
// Deletes are not cancelled: what was ordered under an older term was ordered, and cannot be taken back.
func (m *Manager) Supersede(role string, term int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.terms[role] = max(m.terms[role], term)
	for _, e := range m.sandboxes {
		if isClosed(e.created) || len(e.callers) == 0 {
			continue
		}
		for c := range e.callers {
			if c.Role == role && c.Term < term {
				delete(e.callers, c)
			}
		}
		if len(e.callers) == 0 {
			e.deposed = true
			e.cancel()
		}
	}
}

// callerOf is who makes a call. The pointer tells calls of one caller apart.
func callerOf(ctx context.Context) (*terms.Caller, error) {
	c, err := terms.CallerOf(ctx)
	return &c, err
}

// inForce refuses a caller of a lower term than is known. mu is held.
func (m *Manager) inForce(c *terms.Caller) error {
	if known := m.terms[c.Role]; c.Term < known {
		return terms.Superseded(*c, known)
	}
	return nil
}

// checkCall is what every call that changes something asks first: the agent is meant, ready, and the caller is in
// force. mu is held.
func (m *Manager) checkCall(ctx context.Context, fence *agentv1.Fence) error {
	if err := m.checkAgent(fence); err != nil {
		return err
	}
	if err := m.ready(); err != nil {
		return err
	}
	c, err := callerOf(ctx)
	if err != nil {
		return err
	}
	return m.inForce(c)
}
