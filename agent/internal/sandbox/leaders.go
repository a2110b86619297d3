package sandbox

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/terms"
)

// leaders holds the highest term of each role. The manager's lock guards it.
type leaders map[string]int64

// check refuses a caller of a lower term than the highest of its role.
func (l leaders) check(c *terms.Caller) error {
	if highest := l[c.Role]; c.Term < highest {
		return terms.Superseded(*c, highest)
	}
	return nil
}

// callerOf returns the caller of a call. The pointer distinguishes calls of one caller.
func callerOf(ctx context.Context) (*terms.Caller, error) {
	c, err := terms.CallerOf(ctx)
	return &c, err
}

// Supersede sets a new term of a role. From here on calls of lower terms are refused, also those that were let in and
// wait. A create that only such calls wait for is canceled and undone, unless it has started its process.
//
// The fence alone is not enough. A create may run for minutes while its image is pulled. A leader that lost leadership
// but is only cut off, not dead, would wait for it and answer its client that the sandbox runs, after the new leader may
// have answered the same client's retry with a sandbox on another agent. With Supersede, once a call under the new term
// was answered, every sandbox of the older leader is RUNNING and reported so, or will never run: the new leader need not
// guess. Nothing is lost, because no caller has an answer for a sandbox that has not started, and the new leader can create
// it again. Deletes are not canceled: a delete that was accepted under an older term cannot be taken back.
func (m *Manager) Supersede(role string, term int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leaders[role] = max(m.leaders[role], term)
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
			e.superseded = true
			e.cancel()
		}
	}
}
