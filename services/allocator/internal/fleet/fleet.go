// Package fleet is what the allocator knows of the agents: who they are, how they are reached, what they report. It feeds
// the registry, which counts places, and whoever listens for sandboxes' states. It learns everything from the feed and
// asks nobody. All methods may be called concurrently; those that report on one agent must come in that agent's order.
package fleet

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// Listener is told of agents' reports, for each agent in order, outside of any lock. It must not block.
type Listener interface {
	// AgentSandboxes replaces all reports of an agent.
	AgentSandboxes(agentUID string, reports []*agentv1.SandboxReport)
	// AgentChanges carries new and changed reports; one that is TERMINATED is gone after this.
	AgentChanges(agentUID string, reports []*agentv1.SandboxReport)
	// AgentTombstones carries tombstones that are new, and those that were forgotten.
	AgentTombstones(added []*agentv1.Tombstone, removed []*agentv1.Tombstone)
	// AgentGone tells that the agent's Pod is gone, and all reports with it.
	AgentGone(agentUID string)
}

type member struct {
	info    *agentv1.AgentInfo // immutable once set
	address string
	seen    bool  // a snapshot was received
	heard   int64 // number of messages received
	joined  time.Time
	reports map[identity.Fence]*agentv1.SandboxReport // immutable values
	loose   map[identity.Fence]*agentv1.SandboxReport // those of reports whose custom resource is not known to be written
	graves  map[identity.Fence]*agentv1.Tombstone     // immutable values
	slots   slots                                     // by its last word on them
	told    standing                                  // what watchers were told last
}

// standing is what the sweep tells of: what changes of an agent without a word of its own, by time, and by reservations that
// come and go; and its slots, which change twice for each sandbox and are worth no message each time.
type standing struct {
	ready     bool
	reason    string
	allocated int32
	slots     slots
}

// slots is an agentv1.SlotStatus that can be compared.
type slots struct {
	free, wanted int32
	off          string
}

func slotsOf(s *agentv1.SlotStatus) slots {
	return slots{free: s.GetFree(), wanted: s.GetWanted(), off: s.GetOffReason()}
}

// Fleet is the memory of agents.
type Fleet struct {
	registry *registry.Registry
	clock    clock.PassiveClock
	listener Listener

	mu       sync.Mutex
	agents   map[string]*member
	watchers map[*Watch]struct{}
}

// New returns an empty fleet that feeds reg and tells listener.
func New(reg *registry.Registry, c clock.PassiveClock, listener Listener) *Fleet {
	return &Fleet{registry: reg, clock: c, listener: listener, agents: map[string]*member{}, watchers: map[*Watch]struct{}{}}
}

// Joined makes known the agent of a Pod that runs. info holds what the Pod tells; the agent's own word replaces it.
func (f *Fleet) Joined(info *agentv1.AgentInfo, address string) {
	f.registry.Join(info.GetPodUid(), registry.Pool{Namespace: info.GetNamespace(), Name: info.GetPool()})
	f.mu.Lock()
	defer f.mu.Unlock()
	if m, ok := f.agents[info.GetPodUid()]; ok {
		m.address = address
		return
	}
	f.agents[info.GetPodUid()] = &member{
		info: info, address: address, joined: f.clock.Now(),
		reports: map[identity.Fence]*agentv1.SandboxReport{}, loose: map[identity.Fence]*agentv1.SandboxReport{},
	}
}

// Left forgets an agent whose Pod is gone.
func (f *Fleet) Left(uid string) {
	f.mu.Lock()
	agent := f.agentLocked(uid)
	var graves []*agentv1.Tombstone
	if m := f.agents[uid]; m != nil {
		graves = slices.Collect(maps.Values(m.graves))
	}
	delete(f.agents, uid)
	f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE, agent, nil)
	f.mu.Unlock()
	f.registry.Leave(uid)
	if agent != nil {
		f.listener.AgentTombstones(nil, graves)
		f.listener.AgentGone(uid)
	}
}

// Snapshot replaces what is known of an agent. An agent that has not joined, or has left, is ignored.
func (f *Fleet) Snapshot(uid string, s *agentv1.AgentSnapshot) {
	f.mu.Lock()
	m, ok := f.agents[uid]
	if !ok {
		f.mu.Unlock()
		return
	}
	m.info = s.GetInfo()
	m.slots = slotsOf(s.GetSlots())
	m.seen = true
	m.heard++
	added, removed := m.bury(s.GetTombstones(), nil, true)
	m.reports, m.loose = make(map[identity.Fence]*agentv1.SandboxReport, len(s.GetSandboxes())), map[identity.Fence]*agentv1.SandboxReport{}
	reports, sandboxes := m.take(s.GetSandboxes())
	f.registry.ApplySnapshot(f.clock.Now(), registry.Snapshot{
		UID: uid, Pool: registry.Pool{Namespace: m.info.GetNamespace(), Name: m.info.GetPool()},
		Capacity: int(m.info.GetCapacity()), ReservedPorts: m.info.GetReservedPorts(), Sandboxes: sandboxes,
		Images: s.GetImages(), Accepting: s.GetAccepting(), Reason: s.GetNotAcceptingReason(), FreeSlots: int(m.slots.free),
	})
	f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, f.agentLocked(uid), slices.Collect(maps.Values(m.reports)))
	f.mu.Unlock()
	f.listener.AgentTombstones(added, removed) // first: what is deleted is never shown as running
	f.listener.AgentSandboxes(uid, reports)
}

// Delta changes what is known of an agent; without a snapshot before it is ignored.
func (f *Fleet) Delta(uid string, d *agentv1.AgentDelta) {
	f.mu.Lock()
	m, ok := f.agents[uid]
	if !ok || !m.seen {
		f.mu.Unlock()
		return
	}
	m.heard++
	var freeSlots *int
	if d.GetSlots() != nil {
		m.slots = slotsOf(d.GetSlots())
		freeSlots = ptr.To(int(m.slots.free))
	}
	added, removed := m.bury(d.GetTombstonesAdded(), d.GetTombstonesRemoved(), false)
	reports, sandboxes := m.take(d.GetSandboxes())
	f.registry.ApplyDelta(f.clock.Now(), registry.Delta{
		UID: uid, Sandboxes: sandboxes, ImagesAdded: d.GetImagesAdded(), ImagesRemoved: d.GetImagesRemoved(),
		Accepting: d.Accepting, Reason: d.GetNotAcceptingReason(), FreeSlots: freeSlots,
	})
	agent := f.agentLocked(uid)
	if d.Accepting != nil || len(d.GetImagesAdded())+len(d.GetImagesRemoved()) > 0 {
		f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, agent, slices.Collect(maps.Values(m.reports)))
	}
	if len(reports) > 0 {
		f.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, agent, reports)
	}
	f.mu.Unlock()
	if len(added)+len(removed) > 0 {
		f.listener.AgentTombstones(added, removed)
	}
	if len(reports) > 0 {
		f.listener.AgentChanges(uid, reports)
	}
}

// Heartbeat notes that an agent was heard of.
func (f *Fleet) Heartbeat(uid string) {
	f.mu.Lock()
	if m, ok := f.agents[uid]; ok && m.seen {
		m.heard++
	}
	f.mu.Unlock()
	f.registry.Heartbeat(f.clock.Now(), uid)
}

// Sweep tells watchers of agents that have changed without a word of their own since watchers were told of them: their
// readiness by mere time, their number of places by reservations that were made, released or are over. Reserve and Release
// leave that to it, so that they have nothing to do with watchers. It also tells of slots, without the agent's sandboxes. Call
// it about each second.
func (f *Fleet) Sweep() {
	for _, v := range f.registry.Agents(f.clock.Now()) {
		f.mu.Lock()
		if m, ok := f.agents[v.UID]; ok && m.seen {
			now := standing{ready: v.Ready, reason: v.Reason, allocated: int32(v.Allocated), slots: m.told.slots}
			if m.told != now {
				f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, f.agentLocked(v.UID), slices.Collect(maps.Values(m.reports)))
			}
			if m.told.slots != m.slots {
				f.publish(allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES, f.agentLocked(v.UID), nil)
			}
		}
		f.mu.Unlock()
	}
}

// agentLocked is the API's view of an agent, or nil. The lock is held.
func (f *Fleet) agentLocked(uid string) *allocatorv1.Agent {
	m, ok := f.agents[uid]
	if !ok {
		return nil
	}
	a := &allocatorv1.Agent{
		Info: m.info, Address: m.address, Reason: registry.ReasonConnecting,
		FreeSlots: m.slots.free, WantedSlots: m.slots.wanted, SlotsOffReason: m.slots.off,
	}
	if v, ok := f.registry.Agent(f.clock.Now(), uid); ok {
		a.Allocated, a.ImageCount = int32(v.Allocated), int32(v.Images)
		a.Ready, a.Reason = v.Ready, v.Reason
		if !v.LastHeartbeat.IsZero() {
			a.LastHeartbeatTime = timestamppb.New(v.LastHeartbeat)
		}
	}
	return a
}

// Agents returns the agents of a namespace and pool, empty for any, in the order of namespace, pool and Pod name.
func (f *Fleet) Agents(namespace, pool string) []*allocatorv1.Agent {
	f.mu.Lock()
	defer f.mu.Unlock()
	agents := make([]*allocatorv1.Agent, 0, len(f.agents))
	for uid, m := range f.agents {
		if (namespace == "" || namespace == m.info.GetNamespace()) && (pool == "" || pool == m.info.GetPool()) {
			agents = append(agents, f.agentLocked(uid))
		}
	}
	slices.SortFunc(agents, func(a, b *allocatorv1.Agent) int {
		return cmp.Or(strings.Compare(a.GetInfo().GetNamespace(), b.GetInfo().GetNamespace()),
			strings.Compare(a.GetInfo().GetPool(), b.GetInfo().GetPool()),
			strings.Compare(a.GetInfo().GetPodName(), b.GetInfo().GetPodName()))
	})
	return agents
}

// Agent returns the API's view of one agent; false if it is not known.
func (f *Fleet) Agent(uid string) (*allocatorv1.Agent, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.agentLocked(uid)
	return a, a != nil
}
