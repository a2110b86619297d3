package fleet

import (
	"maps"
	"slices"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// watchBuffer is the number of changes that a watcher may lag behind before its watch ends.
const watchBuffer = 4096

// Watch is one subscription to changes of agents.
type Watch struct {
	fleet           *Fleet
	namespace, pool string
	events          chan *allocatorv1.WatchAgentsResponse
}

// Watch returns all agents that have sent a snapshot, with their sandboxes, and a subscription to every later change. The
// caller must close it.
func (f *Fleet) Watch(namespace, pool string) ([]*allocatorv1.WatchAgentsResponse, *Watch) {
	w := &Watch{fleet: f, namespace: namespace, pool: pool, events: make(chan *allocatorv1.WatchAgentsResponse, watchBuffer)}
	f.mu.Lock()
	defer f.mu.Unlock()
	var initial []*allocatorv1.WatchAgentsResponse
	for uid, m := range f.agents {
		// An agent without a snapshot is left out: an empty list would mean that its sandboxes were removed.
		if agent := f.agentLocked(uid); m.seen && w.selects(agent) {
			initial = append(initial, &allocatorv1.WatchAgentsResponse{
				Type: allocatorv1.WatchAgentsResponse_TYPE_AGENT, Agent: agent, Sandboxes: slices.Collect(maps.Values(m.reports)),
			})
		}
	}
	f.watchers[w] = struct{}{}
	return initial, w
}

// Events returns the channel of changes. It is closed when the watcher was too slow, or by Close.
func (w *Watch) Events() <-chan *allocatorv1.WatchAgentsResponse { return w.events }

// Close ends the subscription. It may be called more than once.
func (w *Watch) Close() {
	w.fleet.mu.Lock()
	defer w.fleet.mu.Unlock()
	w.fleet.drop(w)
}

func (f *Fleet) drop(w *Watch) {
	if _, ok := f.watchers[w]; ok {
		delete(f.watchers, w)
		close(w.events)
	}
}

func (w *Watch) selects(a *allocatorv1.Agent) bool {
	return (w.namespace == "" || w.namespace == a.GetInfo().GetNamespace()) && (w.pool == "" || w.pool == a.GetInfo().GetPool())
}

// publish sends a change to every watcher that selects it, and drops a watcher whose buffer is full. mu is held.
func (f *Fleet) publish(t allocatorv1.WatchAgentsResponse_Type, a *allocatorv1.Agent, reports []*agentv1.SandboxReport) {
	if a == nil {
		return
	}
	if m, ok := f.agents[a.GetInfo().GetPodUid()]; ok {
		m.published = status{a.GetReady(), a.GetReason(), a.GetAllocated(), slots{a.GetFreeSlots(), a.GetWantedSlots(), a.GetSlotsOffReason()}}
	}
	for w := range f.watchers {
		if !w.selects(a) {
			continue
		}
		select {
		case w.events <- &allocatorv1.WatchAgentsResponse{Type: t, Agent: a, Sandboxes: reports}:
		default:
			f.drop(w)
		}
	}
}

// publishDelta publishes what a delta has changed. Slots alone wait for Sweep. mu is held.
func (f *Fleet) publishDelta(m *member, d *agentv1.AgentDelta, reports []*agentv1.SandboxReport) {
	agent := f.agentLocked(m.info.GetPodUid())
	whole := d.Accepting != nil || d.GetApparmor() != nil || d.GetInfo() != nil || len(d.GetImagesAdded())+len(d.GetImagesRemoved()) > 0
	if whole {
		f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, agent, slices.Collect(maps.Values(m.reports)))
	}
	if len(reports) > 0 || d.GetPinnedImages() != nil && !whole {
		f.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, agent, reports)
	}
}

// Sweep publishes agents whose status has changed since watchers last received it. Reserve and Release leave that to Sweep,
// so that an allocation never waits for watchers. A change of slots alone is published without the agent's sandboxes. Call it
// about once a second.
func (f *Fleet) Sweep() {
	for _, v := range f.registry.Agents(f.clock.Now()) {
		f.mu.Lock()
		if m, ok := f.agents[v.UID]; ok && m.seen {
			now := status{ready: v.Ready, reason: v.Reason, allocated: int32(v.Allocated), slots: m.published.slots}
			if m.published != now {
				f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, f.agentLocked(v.UID), slices.Collect(maps.Values(m.reports)))
			}
			if m.published.slots != m.slots {
				f.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, f.agentLocked(v.UID), nil)
			}
		}
		f.mu.Unlock()
	}
}
