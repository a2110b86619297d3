package graph

import (
	"cmp"
	"slices"
)

// Outcome is what a deletion does to an object.
type Outcome string

// The outcomes.
const (
	// Goes: it is deleted.
	Goes Outcome = "Goes"
	// Stays: it loses an owner reference and is kept.
	Stays Outcome = "Stays"
	// Held: it would be deleted, but whether another owner exists is not known.
	Held Outcome = "Held"
)

// Consequence is what a deletion does to one object.
type Consequence struct {
	Object  Object
	Outcome Outcome
	// Depth is the number of references to the deleted object; Via is the UID of the owner through which it is affected.
	Depth int
	Via   string
}

// preview is the state of a simulated deletion.
type preview struct {
	gone    map[*node]bool
	severed map[*target]bool // references that an orphaning owner removes
	found   map[*node]int    // index in out
	out     []Consequence
}

// Preview returns what the deletion of an observed object with a policy would do: the object itself first, then the others by
// depth. It holds if nothing else changes, finalizers for orphaning and foreground deletion are respected, and other
// finalizers are removed in time.
func (g *Graph) Preview(uid string, policy Policy) ([]Consequence, bool) {
	e := g.entries[uid]
	if e == nil || e.node == nil {
		return nil, false
	}
	p := &preview{gone: map[*node]bool{}, severed: map[*target]bool{}, found: map[*node]int{}}
	p.record(e.node, Goes, 0, "")
	p.remove(e.node, policy)
	// Breadth first: the dependents of a deleted object come after those that were found before.
	for queue := []*node{e.node}; len(queue) > 0; queue = queue[1:] {
		owner := queue[0]
		depth := p.out[p.found[owner]].Depth + 1
		for _, d := range owner.dependents() {
			if p.gone[d] {
				continue
			}
			outcome := p.judge(d)
			p.record(d, outcome, depth, owner.UID)
			if outcome == Goes {
				p.remove(d, d.policy())
				queue = append(queue, d)
			}
		}
	}
	slices.SortStableFunc(p.out, func(a, b Consequence) int { return cmp.Compare(a.Depth, b.Depth) })
	return p.out, true
}

func (p *preview) remove(n *node, policy Policy) {
	p.gone[n] = true
	for _, t := range n.entry.targets {
		if policy == Orphan && t.ref.names(&n.Object) {
			p.severed[t] = true
		}
	}
}

func (p *preview) judge(d *node) Outcome {
	left, unclear := 0, false
	for _, e := range d.edges {
		owner := e.target.observed()
		switch {
		case p.severed[e.target]:
		case owner != nil && p.gone[owner]:
			left++
		case e.fate() == dangling || e.fate() == waiting:
			left++
		case e.fate() == solid:
			return Stays
		case e.fate() == open || e.fate() == invalid:
			unclear = true
		}
	}
	switch {
	case unclear && left > 0:
		return Held
	case left > 0:
		return Goes
	}
	return Stays
}

func (p *preview) record(n *node, outcome Outcome, depth int, via string) {
	if i, ok := p.found[n]; ok {
		if outcome != p.out[i].Outcome {
			p.out[i].Outcome, p.out[i].Depth, p.out[i].Via = outcome, depth, via
		}
		return
	}
	p.found[n] = len(p.out)
	p.out = append(p.out, Consequence{Object: n.object(), Outcome: outcome, Depth: depth, Via: via})
}

// dependents returns the observed objects that refer to n, ordered by UID.
func (n *node) dependents() []*node {
	var out []*node
	for _, t := range n.entry.targets {
		if t.ref.names(&n.Object) {
			for d := range t.dependents {
				out = append(out, d)
			}
		}
	}
	slices.SortFunc(out, byUID)
	return slices.Compact(out)
}

func byUID(a, b *node) int { return cmp.Compare(a.UID, b.UID) }
