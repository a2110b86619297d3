package fleet

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Settled tells whether every agent that joined was heard of, or had time enough for it: only then is the absence of a
// sandbox from all reports worth anything.
func (f *Fleet) Settled(patience time.Duration) bool {
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

// Loose is a report of a sandbox whose custom resource its agent does not know to be written.
type Loose struct {
	Report *agentv1.SandboxReport
	// Heard is the number of messages that its agent had sent when the report was looked at.
	Heard int64
}

// Loose returns all such reports, in no order.
func (f *Fleet) Loose() []Loose {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []Loose
	for _, m := range f.agents {
		for _, r := range m.loose {
			out = append(out, Loose{Report: proto.CloneOf(r), Heard: m.heard})
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
	m.graves = map[Key]*agentv1.Tombstone{}
	if !whole {
		maps.Copy(m.graves, before)
	}
	for _, t := range list {
		key := KeyOf(t.GetFence())
		m.graves[key] = t
		if before[key] == nil {
			added = append(added, t)
		}
	}
	for _, f := range forgotten {
		delete(m.graves, KeyOf(f))
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
func (f *Fleet) Tombstoned(key Key) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[key.AgentUID]
	return m != nil && m.graves[key] != nil
}

// Reported tells whether the agent of a container reports it.
func (f *Fleet) Reported(key Key) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.agents[key.AgentUID]
	return m != nil && m.reports[key] != nil
}
