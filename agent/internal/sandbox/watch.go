package sandbox

import (
	"slices"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// watcherBuffer is how many deltas a watcher may be behind before it is cut off.
const watcherBuffer = 1024

// Watcher is told of every change since its snapshot. Snapshot and deltas are shared among watchers: they are read only.
type Watcher struct {
	// Snapshot is the whole state at the beginning.
	Snapshot *agentv1.AgentSnapshot

	deltas chan *agentv1.AgentDelta
	err    error // valid once deltas is closed
}

// Deltas are the changes, in order. The channel is closed when the watcher is cut off; Err says why.
func (w *Watcher) Deltas() <-chan *agentv1.AgentDelta { return w.deltas }

// Err says why the watcher was cut off; it may be called once Deltas is closed.
func (w *Watcher) Err() error { return w.err }

// Watch begins a watch; the snapshot and the deltas after it have no gap between them. Unavailable: the agent does not
// know its sandboxes yet. Unwatch must be called at the end.
func (m *Manager) Watch() (*Watcher, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ready(); err != nil {
		return nil, err
	}
	w := &Watcher{deltas: make(chan *agentv1.AgentDelta, watcherBuffer), Snapshot: &agentv1.AgentSnapshot{
		Info: m.config.Info, Sandboxes: m.reports(), Images: slices.Clone(m.images),
		Accepting: m.taking(), NotAcceptingReason: m.notTakingReason(), Tombstones: m.reportedTombstones(),
		Slots: m.slots,
	}}
	m.watchers[w] = struct{}{}
	return w, nil
}

// Unwatch ends a watch.
func (m *Manager) Unwatch(w *Watcher) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.watchers, w)
}

// publish tells every watcher, and never waits for one: a watcher whose buffer is full is cut off. mu is held.
func (m *Manager) publish(d *agentv1.AgentDelta) {
	for w := range m.watchers {
		select {
		case w.deltas <- d:
		default:
			m.cut(w, fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the watch is %d changes behind; watch anew", watcherBuffer))
		}
	}
}

func (m *Manager) dropWatchers(err error) {
	for w := range m.watchers {
		m.cut(w, err)
	}
}

func (m *Manager) cut(w *Watcher, err error) {
	delete(m.watchers, w)
	w.err = err
	close(w.deltas)
}

// SetAccepting says whether the runtime can run new sandboxes, and why not. Sandboxes that are there go on.
func (m *Manager) SetAccepting(accepting bool, reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if accepting {
		reason = ""
	}
	m.setTaking(func() { m.accepting, m.notReady = accepting, reason })
}

// setTaking changes whether, or why not, sandboxes are taken, and tells watchers if what they see changes. mu is held.
func (m *Manager) setTaking(change func()) {
	was, why := m.taking(), m.notTakingReason()
	change()
	if now := m.taking(); now != was || m.notTakingReason() != why {
		m.publish(&agentv1.AgentDelta{Accepting: &now, NotAcceptingReason: m.notTakingReason()})
	}
}

// taking tells whether new sandboxes are taken: the runtime can run them, and the agent is not drained. mu is held.
func (m *Manager) taking() bool { return m.accepting && !m.draining }

// Accepting tells whether new sandboxes are taken.
func (m *Manager) Accepting() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.adopted && m.taking() && !m.closed
}

// notTakingReason is one reason, even where two apply: whoever drains the agent waits for that one. mu is held.
func (m *Manager) notTakingReason() string {
	switch {
	case m.draining:
		return reasonDraining
	case m.accepting:
		return ""
	}
	return m.notReady
}

// SetImages replaces the images that are on the node, which come sorted and without repetition.
func (m *Manager) SetImages(images []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	added, removed := missing(images, m.images), missing(m.images, images)
	if len(added) == 0 && len(removed) == 0 {
		return
	}
	m.images = slices.Clone(images)
	m.publish(&agentv1.AgentDelta{ImagesAdded: added, ImagesRemoved: removed})
}

// missing is what of a, sorted, is not in b, sorted.
func missing(a, b []string) []string {
	var out []string
	for _, s := range a {
		if _, ok := slices.BinarySearch(b, s); !ok {
			out = append(out, s)
		}
	}
	return out
}
