package fleet

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// AllReported reports whether every agent that joined has sent a snapshot, or has had the timeout to do so. Before that,
// the absence of a sandbox from all reports is no evidence.
func (f *Fleet) AllReported(timeout time.Duration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.clock.Now()
	for _, m := range f.agents {
		if !m.seen && now.Sub(m.joined) < timeout {
			return false
		}
	}
	return true
}

// Unpersisted is a report of a sandbox whose agent does not know of a custom resource.
type Unpersisted struct {
	Report *agentv1.SandboxReport
	// Messages is the number of messages that the agent had sent when the report was read.
	Messages int64
}

// Unpersisted returns all such reports, in no order.
func (f *Fleet) Unpersisted() []Unpersisted {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Unpersisted
	for _, m := range f.agents {
		for _, r := range m.unpersisted {
			out = append(out, Unpersisted{Report: proto.CloneOf(r), Messages: m.messages})
		}
	}
	return out
}

// updateTombstones applies a change of an agent's tombstones, or replaces them all, and returns the difference.
func (m *member) updateTombstones(list []*agentv1.Tombstone, forgotten []*agentv1.Fence, replace bool) (added, removed []*agentv1.Tombstone) {
	if !replace && len(list)+len(forgotten) == 0 {
		return nil, nil
	}
	before := m.tombstones
	m.tombstones = map[identity.Fence]*agentv1.Tombstone{}
	if !replace {
		maps.Copy(m.tombstones, before)
	}
	for _, t := range list {
		fence := identity.FenceOf(t.GetFence())
		m.tombstones[fence] = t
		if before[fence] == nil {
			added = append(added, t)
		}
	}
	for _, f := range forgotten {
		delete(m.tombstones, identity.FenceOf(f))
	}
	for fence, t := range before {
		if m.tombstones[fence] == nil {
			removed = append(removed, t)
		}
	}
	return added, removed
}

// Tombstones returns the tombstones of all agents, in no order.
func (f *Fleet) Tombstones() []*agentv1.Tombstone {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []*agentv1.Tombstone
	for _, m := range f.agents {
		out = slices.AppendSeq(out, maps.Values(m.tombstones))
	}
	return out
}

// HasTombstone reports whether a container's agent keeps a tombstone of it.
func (f *Fleet) HasTombstone(fence identity.Fence) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[fence.AgentUID]
	return m != nil && m.tombstones[fence] != nil
}

// Reported reports whether a container's agent has it.
func (f *Fleet) Reported(fence identity.Fence) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[fence.AgentUID]
	return m != nil && m.reports[fence] != nil
}

// Superseded reports whether a container can be what an attempt under a name has left: its agent has it under that name, and no
// custom resource was written for it. Who names the attempt may lie.
func (f *Fleet) Superseded(fence identity.Fence, namespace, name string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[fence.AgentUID]
	if m == nil {
		return false
	}
	r := m.unpersisted[fence]
	return r != nil && r.GetRecord().GetNamespace() == namespace && r.GetRecord().GetName() == name
}
