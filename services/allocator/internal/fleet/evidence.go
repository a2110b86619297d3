package fleet

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// AllReported reports whether every agent that joined was heard of, or had time enough for it: only then is the absence of a
// sandbox from all reports worth anything.
func (f *Fleet) AllReported(patience time.Duration) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.clock.Now()
	for _, m := range f.agents {
		if !m.seen && now.Sub(m.joined) < patience {
			return false
		}
	}
	return true
}

// Unpersisted is a report of a sandbox whose custom resource its agent does not know to be written.
type Unpersisted struct {
	Report *agentv1.SandboxReport
	// Messages is the number of messages that its agent had sent when Unpersisted was called.
	Messages int64
}

// Unpersisted returns all such reports, in no order.
func (f *Fleet) Unpersisted() []Unpersisted {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Unpersisted
	for _, m := range f.agents {
		for _, r := range m.loose {
			out = append(out, Unpersisted{Report: proto.CloneOf(r), Messages: m.heard})
		}
	}
	return out
}

// bury takes tombstones in, all that there are or what has changed, and returns what is new and what is no more.
func (m *member) bury(list []*agentv1.Tombstone, forgotten []*agentv1.Fence, whole bool) (added, removed []*agentv1.Tombstone) {
	if !whole && len(list)+len(forgotten) == 0 {
		return nil, nil
	}
	before := m.graves
	m.graves = map[identity.Fence]*agentv1.Tombstone{}
	if !whole {
		maps.Copy(m.graves, before)
	}
	for _, t := range list {
		key := identity.FenceOf(t.GetFence())
		m.graves[key] = t
		if before[key] == nil {
			added = append(added, t)
		}
	}
	for _, f := range forgotten {
		delete(m.graves, identity.FenceOf(f))
	}
	for key, t := range before {
		if m.graves[key] == nil {
			removed = append(removed, t)
		}
	}
	return added, removed
}

// Tombstones returns all tombstones that agents keep, in no order.
func (f *Fleet) Tombstones() []*agentv1.Tombstone {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []*agentv1.Tombstone
	for _, m := range f.agents {
		out = slices.AppendSeq(out, maps.Values(m.graves))
	}
	return out
}

// Tombstoned tells whether the agent of a container keeps a tombstone of it.
func (f *Fleet) HasTombstone(key identity.Fence) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[key.AgentUID]
	return m != nil && m.graves[key] != nil
}

// Reported tells whether the agent of a container reports it.
func (f *Fleet) Reported(key identity.Fence) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[key.AgentUID]
	return m != nil && m.reports[key] != nil
}
