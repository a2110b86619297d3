package registry_test

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

// model is a naive registry: it keeps all input and answers every question by a search of all of it. Its
// choice is placement.Choose.
type model struct {
	now    time.Time
	agents map[string]*modelAgent
	// shown is how many sandboxes are visible in a namespace, creating the namespace of each that is being created.
	shown    map[string]int64
	creating map[string]string
	limits   map[string]registry.Limits
	// where has the agents with an allocation of a key, the one that answers for it first.
	where map[identity.Fence][]string
}

type modelAgent struct {
	pool            registry.Pool
	seen, accepting bool
	reason          string
	lastHeartbeat   time.Time
	capacity        int
	ports           []int32
	images          map[string]struct{}
	slots, claimed  int
	allocations     map[identity.Fence]*modelAllocation
}

type modelAllocation struct {
	ports              []int32
	demand             registry.Demand
	reported, reserved bool
	until              time.Time
}

func newModel() *model {
	return &model{
		now: epoch, agents: map[string]*modelAgent{}, where: map[identity.Fence][]string{},
		shown: map[string]int64{}, creating: map[string]string{}, limits: map[string]registry.Limits{},
	}
}

func (m *model) join(uid string, pool registry.Pool) *modelAgent {
	a := m.agents[uid]
	if a == nil {
		a = &modelAgent{images: map[string]struct{}{}, allocations: map[identity.Fence]*modelAllocation{}}
		m.agents[uid] = a
	}
	a.pool = pool
	return a
}

func (m *model) leave(uid string) {
	if a := m.agents[uid]; a != nil {
		for _, k := range slices.Collect(maps.Keys(a.allocations)) {
			m.remove(uid, k)
		}
		delete(m.agents, uid)
	}
}

func (m *model) remove(uid string, k identity.Fence) {
	delete(m.agents[uid].allocations, k)
	m.where[k] = slices.DeleteFunc(m.where[k], func(s string) bool { return s == uid })
}

// settle removes an allocation that is neither reported nor reserved.
func (m *model) settle(uid string, k identity.Fence) {
	if p := m.agents[uid].allocations[k]; p != nil && !p.reported && !p.reserved {
		m.remove(uid, k)
	}
}

func (m *model) pass(d time.Duration) {
	m.now = m.now.Add(d)
	for uid, a := range m.agents {
		for k, p := range a.allocations {
			if p.reserved && !m.now.Before(p.until) {
				p.reserved = false
				m.settle(uid, k)
			}
		}
	}
}

func (m *model) report(uid string, sb registry.Sandbox) {
	a := m.agents[uid]
	p := a.allocations[sb.Fence]
	if sb.Ended {
		if p != nil {
			m.remove(uid, sb.Fence)
		}
		return
	}
	if p == nil {
		p = &modelAllocation{demand: sb.Demand}
		a.allocations[sb.Fence] = p
		m.where[sb.Fence] = slices.Insert(m.where[sb.Fence], min(1, len(m.where[sb.Fence])), uid)
	}
	if p.reserved && !p.reported {
		a.claimed++
	}
	p.ports, p.reported, p.reserved = sb.Ports, true, false
}

func (m *model) snapshot(s registry.Snapshot) {
	a := m.join(s.UID, s.Pool)
	a.seen, a.lastHeartbeat, a.accepting, a.reason = true, m.now, s.Accepting, s.Reason
	a.capacity, a.ports = s.Capacity, s.ReservedPorts
	a.images = map[string]struct{}{}
	for _, i := range s.Images {
		a.images[i] = struct{}{}
	}
	listed := map[identity.Fence]bool{}
	for _, sb := range s.Sandboxes {
		m.report(s.UID, sb)
		listed[sb.Fence] = !sb.Ended
	}
	for k, p := range a.allocations {
		if p.reported && !listed[k] {
			p.reported = false
			m.settle(s.UID, k)
		}
	}
	a.slots, a.claimed = s.FreeSlots, 0
}

func (m *model) delta(d registry.Delta) bool {
	a := m.agents[d.UID]
	if a == nil || !a.seen {
		return false
	}
	a.lastHeartbeat = m.now
	if d.Accepting != nil {
		a.accepting, a.reason = *d.Accepting, d.Reason
	}
	for _, i := range d.ImagesRemoved {
		delete(a.images, i)
	}
	for _, i := range d.ImagesAdded {
		a.images[i] = struct{}{}
	}
	for _, sb := range d.Sandboxes {
		m.report(d.UID, sb)
	}
	if d.FreeSlots != nil {
		a.slots, a.claimed = *d.FreeSlots, 0
	}
	return true
}

func (m *model) heartbeat(uid string) {
	if a := m.agents[uid]; a != nil && a.seen {
		a.lastHeartbeat = m.now
	}
}

func (m *model) release(k identity.Fence, uid string) {
	if uid == "" && len(m.where[k]) > 0 {
		uid = m.where[k][0]
	}
	if a := m.agents[uid]; a != nil && a.allocations[k] != nil {
		a.allocations[k].reserved = false
		m.settle(uid, k)
	}
}

// used is what the sandboxes of a namespace use.
func (m *model) used(namespace string) registry.Amounts {
	var used registry.Amounts
	for _, a := range m.agents {
		for _, p := range a.allocations {
			if a.pool.Namespace == namespace {
				used[registry.CPU] += p.demand.CPU
				used[registry.Memory] += p.demand.Memory
			}
		}
	}
	used[registry.Sandboxes] = m.shown[namespace]
	for _, in := range m.creating {
		if in == namespace {
			used[registry.Sandboxes]++
		}
	}
	return used
}

// overQuota returns the reason for which quotas refuse a request; empty if they do not.
func (m *model) overQuota(req registry.Request) fault.Reason {
	asked := registry.Amounts{registry.CPU: req.Demand.CPU, registry.Memory: req.Demand.Memory}
	if _, counted := m.creating[req.Fence.SandboxUID]; req.New && !counted {
		asked[registry.Sandboxes] = 1
	}
	used := m.used(req.Pool.Namespace)
	for i, limit := range m.limits[req.Pool.Namespace] {
		if limit != nil && asked[i] > 0 && used[i]+asked[i] > limit.Hard {
			return fault.QuotaExceeded
		}
	}
	return ""
}

// seen is what placement gets to know of an agent.
func (m *model) seen(uid string) *placement.Agent {
	a := m.agents[uid]
	out := &placement.Agent{
		UID: uid, Ready: a.seen && a.accepting && m.now.Sub(a.lastHeartbeat) <= registry.DefaultHeartbeatTimeout,
		Capacity: a.capacity, Allocated: len(a.allocations), Images: a.images, Ports: map[int32]int{},
	}
	pending := 0
	for _, port := range a.ports {
		out.Ports[port]++
	}
	for _, p := range a.allocations {
		for _, port := range p.ports {
			out.Ports[port]++
		}
		if !p.reported {
			pending++
		}
	}
	out.FreeSlots = max(0, a.slots-a.claimed-pending)
	return out
}

// record adds an allocation of the registry.
func (m *model) record(uid string, req registry.Request) {
	a := m.agents[uid]
	p := a.allocations[req.Fence]
	if p == nil {
		p = &modelAllocation{ports: req.Ports, demand: req.Demand}
		a.allocations[req.Fence] = p
	}
	p.reserved, p.until = true, m.now.Add(registry.DefaultReservation)
	if _, counted := m.creating[req.Fence.SandboxUID]; req.New && !counted {
		m.creating[req.Fence.SandboxUID] = req.Pool.Namespace
	}
	m.where[req.Fence] = append([]string{uid}, slices.DeleteFunc(m.where[req.Fence], func(s string) bool { return s == uid })...)
}

// allocate compares the registry's answer with what the model makes of the same request.
func (m *model) allocate(t require.TestingT, req registry.Request, got string, err error) {
	if uids := m.where[req.Fence]; len(uids) > 0 && m.agents[uids[0]].pool == req.Pool {
		p := m.agents[uids[0]].allocations[req.Fence]
		if !slices.Contains(req.Exclude, uids[0]) {
			require.NoError(t, err)
			require.Equal(t, uids[0], got, "the same key has the same agent")
			if p.reserved {
				p.until = m.now.Add(registry.DefaultReservation)
			}
			return
		}
		p.reserved = false
		m.settle(uids[0], req.Fence)
	}
	var agents []*placement.Agent
	for _, uid := range slices.Sorted(maps.Keys(m.agents)) {
		if m.agents[uid].pool == req.Pool {
			agents = append(agents, m.seen(uid))
		}
	}
	if reason := m.overQuota(req); reason != "" && len(agents) > 0 {
		require.Equal(t, reason, fault.ReasonOf(err), "%v", err)
		return
	}
	rule := &placement.Request{Image: req.Image, Ports: req.Ports, Exclude: req.Exclude}
	want := placement.Choose(agents, rule)
	if want.Chosen == nil {
		require.Empty(t, got)
		m.refused(t, req, agents, want, err)
		return
	}
	require.NoError(t, err)
	require.NotNil(t, m.agents[got], "%q", got)
	alone := placement.Choose([]*placement.Agent{m.seen(got)}, rule)
	require.NotNil(t, alone.Chosen, "%s is not fit", got)
	require.Equal(t, req.Pool, m.agents[got].pool)
	require.Equal(t, want.Chosen.Score(req.Image), alone.Chosen.Score(req.Image), "%s was chosen, %s is better", got, want.Chosen.UID)
	m.record(got, req)
}

func (m *model) refused(t require.TestingT, req registry.Request, agents []*placement.Agent, want placement.Verdict, err error) {
	var e *fault.Error
	require.ErrorAs(t, err, &e)
	require.Equal(t, req.Pool.Name, e.Metadata()["pool"])
	name := req.Pool.Namespace + "/" + req.Pool.Name
	if want.Conflicting == 0 {
		require.Equal(t, fault.NoCapacity, e.Reason())
		message := fmt.Sprintf("no agent of pool %s has free capacity: %d full, %d not ready, %d excluded", name, want.Full, want.NotReady, want.Excluded)
		if len(agents) == 0 {
			message = fmt.Sprintf("pool %s has no agents", name)
		}
		require.Equal(t, message, e.Message())
		return
	}
	require.Equal(t, fault.PortConflict, e.Reason())
	var most string
	best := 0
	for _, port := range req.Ports {
		n := 0
		for _, a := range agents {
			if a.Ready && a.Allocated < a.Capacity && a.Ports[port] > 0 && !slices.Contains(req.Exclude, a.UID) {
				n++
			}
		}
		if n > best {
			most, best = fmt.Sprint(port), n
		}
	}
	require.Equal(t, most, e.Metadata()["port"], "the port that is in the way most")
	require.Equal(t, fmt.Sprintf("port %s is taken on every agent of pool %s that has free capacity", most, name), e.Message())
}

// compare compares what both know of every agent.
func (m *model) compare(t require.TestingT, views []registry.View) {
	require.Len(t, views, len(m.agents))
	for _, v := range views {
		a, p := m.agents[v.UID], m.seen(v.UID)
		want := registry.View{
			UID: v.UID, Pool: a.pool, Capacity: a.capacity, Allocated: len(a.allocations), FreeSlots: p.FreeSlots,
			Images: len(a.images), Ready: p.Ready, LastHeartbeat: a.lastHeartbeat,
		}
		switch {
		case !a.seen:
			want.Reason = registry.ReasonConnecting
		case m.now.Sub(a.lastHeartbeat) > registry.DefaultHeartbeatTimeout:
			want.Reason = registry.ReasonHeartbeat
		case !a.accepting:
			want.Reason = a.reason
		}
		require.Equal(t, want, v)
	}
}
