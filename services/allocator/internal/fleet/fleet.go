// Package fleet owns what the allocator knows about agents: their identity, address, images, slots, tombstones and
// reports. It learns all of that from the feed, never asks an agent, and does no I/O. It updates the registry, which counts
// capacity, and a Listener, which follows the states of sandboxes. All methods may be called concurrently, but the methods
// that update one agent must be called in the order of that agent's messages.
//
// The name, uid, namespace, pool and node of an agent are those of its Pod, whatever the agent says. Its word counts only for its
// own containers: reports and tombstones that name another agent, namespace or pool are refused.
//
// Lock order: Fleet.mu, then the registry's lock. The listener is called without a lock.
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

// Listener receives the reports of agents: those of one agent in order, and without any lock held. It must not block.
type Listener interface {
	// AgentJoined is called before anything else of an agent, with the namespace of its Pod.
	AgentJoined(agentUID, namespace string)
	// AgentSandboxes replaces all reports of an agent.
	AgentSandboxes(agentUID string, reports []*agentv1.SandboxReport)
	// AgentChanges carries new and changed reports. A TERMINATED one is the last of its container.
	AgentChanges(agentUID string, reports []*agentv1.SandboxReport)
	// AgentTombstones carries the tombstones that an agent has added and removed.
	AgentTombstones(added []*agentv1.Tombstone, removed []*agentv1.Tombstone)
	// AgentGone is called when the agent's Pod was removed. All its reports are void.
	AgentGone(agentUID string)
}

// member is one agent.
type member struct {
	pod         *agentv1.AgentInfo // immutable; what the Pod says
	info        *agentv1.AgentInfo // immutable; pod, with what the agent says of itself
	address     string
	seen        bool  // a snapshot was received
	messages    int64 // number of messages received
	joined      time.Time
	reports     map[identity.Fence]*agentv1.SandboxReport // immutable values
	unpersisted map[identity.Fence]*agentv1.SandboxReport // the reports whose agent does not know of a custom resource
	tombstones  map[identity.Fence]*agentv1.Tombstone     // immutable values
	pinned      []*agentv1.PinnedImage                    // immutable values
	apparmor    *agentv1.AppArmorStatus                   // immutable; nil if the agent has not said
	slots       slots                                     // by the agent's last report
	published   status                                    // what watchers received last
}

// status is what Sweep publishes: the part of an agent that changes without a message of it (readiness, by time; allocated
// capacity, by reservations), and its slots, which change twice for each sandbox and are not worth a message each time.
type status struct {
	ready     bool
	reason    string
	allocated int32
	slots     slots
}

// slots is a comparable agentv1.SlotStatus.
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
	refusals Refusals

	mu       sync.Mutex
	agents   map[string]*member
	watchers map[*Watch]struct{}
}

// New returns an empty fleet that updates reg and listener. refusals may be nil.
func New(reg *registry.Registry, c clock.PassiveClock, listener Listener, refusals Refusals) *Fleet {
	return &Fleet{registry: reg, clock: c, listener: listener, refusals: refusals, agents: map[string]*member{}, watchers: map[*Watch]struct{}{}}
}

// Joined adds the agent of a running Pod, or updates its address. info holds what the Pod says; the agent's snapshot adds to it.
func (f *Fleet) Joined(info *agentv1.AgentInfo, address string) {
	f.listener.AgentJoined(info.GetPodUid(), info.GetNamespace())
	f.registry.Join(info.GetPodUid(), registry.Pool{Namespace: info.GetNamespace(), Name: info.GetPool()})
	f.mu.Lock()
	defer f.mu.Unlock()
	if m, ok := f.agents[info.GetPodUid()]; ok {
		m.address, m.pod = address, info
		return
	}
	f.agents[info.GetPodUid()] = &member{
		pod: info, info: info, address: address, joined: f.clock.Now(),
		reports: map[identity.Fence]*agentv1.SandboxReport{}, unpersisted: map[identity.Fence]*agentv1.SandboxReport{},
	}
}

// Left removes an agent whose Pod was removed.
func (f *Fleet) Left(uid string) {
	f.mu.Lock()
	agent := f.agentLocked(uid)
	var tombstones []*agentv1.Tombstone
	if m := f.agents[uid]; m != nil {
		tombstones = slices.Collect(maps.Values(m.tombstones))
	}
	delete(f.agents, uid)
	f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE, agent, nil)
	f.mu.Unlock()
	f.registry.Leave(uid)
	if agent != nil {
		f.listener.AgentTombstones(nil, tombstones)
		f.listener.AgentGone(uid)
	}
}

// Snapshot replaces what is known about an agent. A snapshot of an agent that has not joined, or has left, is ignored.
func (f *Fleet) Snapshot(uid string, s *agentv1.AgentSnapshot) {
	f.mu.Lock()
	m, ok := f.agents[uid]
	if !ok {
		f.mu.Unlock()
		return
	}
	m.info = m.described(s.GetInfo())
	m.slots = slotsOf(s.GetSlots())
	m.pinned = s.GetPinnedImages()
	m.apparmor = s.GetApparmor()
	m.seen = true
	m.messages++
	tombstones, foreignTombstones := m.ownTombstones(s.GetTombstones())
	reported, foreignReports := m.ownReports(s.GetSandboxes())
	added, removed := m.updateTombstones(tombstones, nil, true)
	m.reports = make(map[identity.Fence]*agentv1.SandboxReport, len(reported))
	m.unpersisted = map[identity.Fence]*agentv1.SandboxReport{}
	reports, sandboxes := m.updateReports(reported)
	f.registry.ApplySnapshot(f.clock.Now(), registry.Snapshot{
		UID: uid, Pool: registry.Pool{Namespace: m.info.GetNamespace(), Name: m.info.GetPool()},
		Capacity: int(m.info.GetCapacity()), ReservedPorts: m.info.GetReservedPorts(), Sandboxes: sandboxes,
		Images: s.GetImages(), Accepting: s.GetAccepting(), Reason: s.GetNotAcceptingReason(), FreeSlots: int(m.slots.free),
	})
	f.publish(allocatorv1.WatchAgentsResponse_TYPE_AGENT, f.agentLocked(uid), slices.Collect(maps.Values(m.reports)))
	pod := m.pod
	f.mu.Unlock()
	f.refuse(pod, foreignReports, foreignTombstones)
	f.listener.AgentTombstones(added, removed) // before the reports, so that a deleted sandbox is never shown as running
	f.listener.AgentSandboxes(uid, reports)
}

// Delta applies a change to an agent. It is ignored if no snapshot came before it.
func (f *Fleet) Delta(uid string, d *agentv1.AgentDelta) {
	f.mu.Lock()
	m, ok := f.agents[uid]
	if !ok || !m.seen {
		f.mu.Unlock()
		return
	}
	m.messages++
	var freeSlots *int
	if d.GetSlots() != nil {
		m.slots = slotsOf(d.GetSlots())
		freeSlots = ptr.To(int(m.slots.free))
	}
	if d.GetApparmor() != nil {
		m.apparmor = d.GetApparmor()
	}
	if d.GetInfo() != nil {
		m.info = m.described(d.GetInfo())
	}
	if d.GetPinnedImages() != nil {
		m.pinned = d.GetPinnedImages().GetImages()
	}
	tombstones, foreignTombstones := m.ownTombstones(d.GetTombstonesAdded())
	reported, foreignReports := m.ownReports(d.GetSandboxes())
	added, removed := m.updateTombstones(tombstones, d.GetTombstonesRemoved(), false)
	reports, sandboxes := m.updateReports(reported)
	f.registry.ApplyDelta(f.clock.Now(), registry.Delta{
		UID: uid, Sandboxes: sandboxes, ImagesAdded: d.GetImagesAdded(), ImagesRemoved: d.GetImagesRemoved(),
		Accepting: d.Accepting, Reason: d.GetNotAcceptingReason(), FreeSlots: freeSlots,
	})
	f.publishDelta(m, d, reports)
	pod := m.pod
	f.mu.Unlock()
	f.refuse(pod, foreignReports, foreignTombstones)
	if len(added)+len(removed) > 0 {
		f.listener.AgentTombstones(added, removed)
	}
	if len(reports) > 0 {
		f.listener.AgentChanges(uid, reports)
	}
}

// Heartbeat records a message of an agent that carries no change.
func (f *Fleet) Heartbeat(uid string) {
	f.mu.Lock()
	if m, ok := f.agents[uid]; ok && m.seen {
		m.messages++
	}
	f.mu.Unlock()
	f.registry.Heartbeat(f.clock.Now(), uid)
}

// agentLocked returns the API's view of an agent, or nil. mu is held.
func (f *Fleet) agentLocked(uid string) *allocatorv1.Agent {
	m, ok := f.agents[uid]
	if !ok {
		return nil
	}
	a := &allocatorv1.Agent{
		Info: m.info, Address: m.address, Reason: registry.ReasonConnecting,
		FreeSlots: m.slots.free, WantedSlots: m.slots.wanted, SlotsOffReason: m.slots.off, PinnedImages: m.pinned,
		Apparmor: m.apparmor,
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

// Agent returns the API's view of one agent, and whether it is known.
func (f *Fleet) Agent(uid string) (*allocatorv1.Agent, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a := f.agentLocked(uid)
	return a, a != nil
}

// Images returns the normalized references of the images on an agent's node, sorted.
func (f *Fleet) Images(uid string) []string {
	images := f.registry.Images(uid)
	slices.Sort(images)
	return images
}
