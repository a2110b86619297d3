package fleet

import (
	"maps"
	"slices"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// watchBuffer is how many changes a watcher may lag behind before it is ended.
const watchBuffer = 4096

// Watch is one subscription to changes of agents.
type Watch struct {
	fleet           *Fleet
	namespace, pool string
	events          chan *allocatorv1.WatchAgentsResponse
}

// Watch returns all agents that were heard of, with their sandboxes, and a subscription to every change after that. Close
// it when done.
func (f *Fleet) Watch(namespace, pool string) ([]*allocatorv1.WatchAgentsResponse, *Watch) {
	w := &Watch{fleet: f, namespace: namespace, pool: pool, events: make(chan *allocatorv1.WatchAgentsResponse, watchBuffer)}
	f.mu.Lock()
	defer f.mu.Unlock()
	var initial []*allocatorv1.WatchAgentsResponse
	for uid, m := range f.agents {
		// An agent that was never heard of must not be told of: an empty list would mean that its sandboxes are gone.
		if agent := f.agentLocked(uid); m.seen && w.wants(agent) {
			initial = append(initial, &allocatorv1.WatchAgentsResponse{
				Type: allocatorv1.WatchAgentsResponse_TYPE_AGENT, Agent: agent, Sandboxes: slices.Collect(maps.Values(m.reports)),
			})
		}
	}
	f.watchers[w] = struct{}{}
	return initial, w
}

// Events carries the changes. It is closed when the watcher was too slow, or closed itself.
func (w *Watch) Events() <-chan *allocatorv1.WatchAgentsResponse { return w.events }

// Close ends the subscription. It may be called again.
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

func (w *Watch) wants(a *allocatorv1.Agent) bool {
	return (w.namespace == "" || w.namespace == a.GetInfo().GetNamespace()) && (w.pool == "" || w.pool == a.GetInfo().GetPool())
}

// publish sends a change to every watcher that wants it; one that cannot take it is dropped. The lock is held.
func (f *Fleet) publish(t allocatorv1.WatchAgentsResponse_Type, a *allocatorv1.Agent, reports []*agentv1.SandboxReport) {
	if a == nil {
		return
	}
	if m, ok := f.agents[a.GetInfo().GetPodUid()]; ok {
		m.told = standing{a.GetReady(), a.GetReason(), a.GetAllocated(), slots{a.GetFreeSlots(), a.GetWantedSlots(), a.GetSlotsOffReason()}}
	}
	for w := range f.watchers {
		if !w.wants(a) {
			continue
		}
		select {
		case w.events <- &allocatorv1.WatchAgentsResponse{Type: t, Agent: a, Sandboxes: reports}:
		default:
			f.drop(w)
		}
	}
}
