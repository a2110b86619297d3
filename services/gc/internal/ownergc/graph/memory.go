package graph

// memory remembers deleted owners after the last reference to them has left the graph, so that dependents that are created late
// need no lookup. It drops the oldest first. A deleted owner is deleted in every version.
type memory struct {
	limit int
	known map[Ref]struct{}
	order []Ref // a ring once it is full
	next  int
}

func newMemory(limit int) memory { return memory{limit: limit, known: map[Ref]struct{}{}} }

func (m *memory) add(r Ref) {
	r.Version = ""
	if _, ok := m.known[r]; ok || m.limit <= 0 {
		return
	}
	m.known[r] = struct{}{}
	if len(m.order) < m.limit {
		m.order = append(m.order, r)
		return
	}
	delete(m.known, m.order[m.next])
	m.order[m.next] = r
	m.next = (m.next + 1) % m.limit
}

func (m *memory) has(r Ref) bool {
	r.Version = ""
	_, ok := m.known[r]
	return ok
}
