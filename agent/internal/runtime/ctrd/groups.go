package ctrd

import "sync"

// groups has the slots of this process by group, from before they have a record until their task is about to be removed. A group
// that has become empty is never joined again, so that its shim can be ended safely.
type groups struct {
	mu      sync.Mutex
	of      map[string]string // group by slot
	members map[string]int    // by group; no entry for an empty one
	// current is the group that slots join which ask for the group wanted.
	wanted, current string
}

func newGroups() *groups { return &groups{of: map[string]string{}, members: map[string]int{}} }

// join adds a slot and returns its group: the one that it asks for, or one of its own if all slots of that one have left.
func (g *groups) join(id, wanted string) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wanted != wanted || g.members[g.current] == 0 {
		g.wanted, g.current = wanted, id
	}
	g.of[id] = g.current
	g.members[g.current]++
	return g.current
}

// leave removes a slot, or a container that was one. Safe to repeat.
func (g *groups) leave(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	group, ok := g.of[id]
	if !ok {
		return
	}
	delete(g.of, id)
	if g.members[group]--; g.members[group] == 0 {
		delete(g.members, group)
	}
}

// joined reports whether a group has slots of this process.
func (g *groups) joined(group string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.members[group] > 0
}
