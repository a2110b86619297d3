package sandbox

import (
	"context"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	// drainFile exists while the agent is drained.
	drainFile = "draining"
	// reasonDraining is the reason that the API promises.
	reasonDraining = "Draining"
)

// gate decides whether calls are taken at all, and whether creates are. The manager's lock guards it.
type gate struct {
	// adopted: the sandboxes are known; calls are taken from then on, until closed.
	adopted, closed bool
	// runtimeReady: the runtime can run new sandboxes; notReady is why not.
	runtimeReady bool
	notReady     string
	// draining: the agent was drained.
	draining bool
}

func errClosing() error {
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
}

// ready returns nil if calls are taken.
func (g *gate) ready() error {
	switch {
	case g.closed:
		return errClosing()
	case !g.adopted:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the agent does not know its sandboxes yet: %s", g.notReady)
	}
	return nil
}

// accepting reports whether new sandboxes are accepted, as watchers see it.
func (g *gate) accepting() bool { return g.runtimeReady && !g.draining }

// reason returns why no new sandboxes are accepted. It is one reason even where two apply: the controller that drains the
// agent waits for that one.
func (g *gate) reason() string {
	switch {
	case g.draining:
		return reasonDraining
	case g.runtimeReady:
		return ""
	}
	return g.notReady
}

// refusal returns why a new sandbox is refused, or nil.
func (g *gate) refusal() error {
	switch {
	case g.draining:
		return fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "the agent accepts no sandboxes: it is draining")
	case !g.runtimeReady:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the agent accepts no sandboxes: %s", g.notReady)
	}
	return nil
}

// SetAccepting sets whether the runtime can run new sandboxes, and why not. Sandboxes that exist run on.
func (m *Manager) SetAccepting(accepting bool, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if accepting {
		reason = ""
	}
	m.gate.runtimeReady, m.gate.notReady = accepting, reason
	if !m.gate.adopted {
		m.config.Status.Close(m.gate.ready())
	}
	m.publishAccepting()
}

// Accepting reports whether new sandboxes are accepted.
func (m *Manager) Accepting() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.gate.ready() == nil && m.gate.accepting()
}

// publishAccepting is called with mu held.
func (m *Manager) publishAccepting() {
	m.config.Status.SetAccepting(m.gate.accepting(), m.gate.reason())
}

// Drain makes the agent accept no new sandboxes, or accept them again, durably, and returns how many it has, ended ones and
// creates and deletes that run included. Once it has returned, none is admitted. Safe to repeat. Unavailable: it could not
// be made durable, and is not in force.
func (m *Manager) Drain(ctx context.Context, agentUID string, resume bool) (int, error) {
	caller, err := callerOf(ctx)
	if err != nil {
		return 0, err
	}
	m.settingDrain.Lock()
	defer m.settingDrain.Unlock()
	m.mu.Lock()
	err = m.checkCall(caller, &agentv1.Fence{AgentUid: agentUID})
	change := m.gate.draining == resume
	m.mu.Unlock()
	if err != nil {
		return 0, err
	}
	if change {
		if err := m.writeDrain(!resume); err != nil {
			return 0, fault.Wrap(err, errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent cannot keep its state on the disk")
		}
		logr.FromContextOrDiscard(ctx).Info("draining changed", obs.KeyDraining, !resume)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gate.draining = !resume
	m.publishAccepting()
	m.updateRoom()
	return len(m.sandboxes), nil
}

func (m *Manager) writeDrain(on bool) error {
	if on {
		return m.config.State.Write(drainFile, nil)
	}
	return m.config.State.Remove(drainFile)
}
