package graph

// Kinds takes in which kinds there are, and whether they have namespaces. What it does not name stays as it was known.
// Owners whose kind nobody knew are asked for again.
func (g *Graph) Kinds(scopes map[Kind]Scope) Effects {
	changed := map[Kind]bool{}
	for kind, scope := range scopes {
		if g.scopes[kind] != scope {
			g.scopes[kind] = scope
			changed[kind] = true
		}
	}
	var again []*node
	for _, e := range g.entries {
		for _, t := range e.targets {
			if t.state == unresolvable {
				t.state = unknown
				g.ask(t)
			}
			if changed[t.ref.Kind] {
				for d := range t.dependents {
					again = append(again, d)
				}
			}
		}
	}
	for _, n := range again {
		g.relink(n, n.object().Owners)
		g.consider(n)
	}
	return g.effects()
}

// Observe takes in an object as a list or watch shows it. What was shown before, once more, changes nothing. If the UID is
// known as one of another kind, which one object that two API groups serve is, the first stays.
func (g *Graph) Observe(o Object) Effects {
	g.observe(o)
	return g.effects()
}

// List takes in all objects of a kind as a list shows them, at once: an owner never looks as if it had no dependents only
// because they come later in the list. Objects of the kind that the list does not have any more, although nobody saw them
// go, are doubtful until the API server was asked for them, or they are observed again; until then they own and block as
// before, but nothing is collected because of them.
func (g *Graph) List(kind Kind, list []Object) Effects {
	missing := map[string]struct{}{}
	for uid, e := range g.entries {
		if e.node != nil && e.node.Kind == kind {
			missing[uid] = struct{}{}
		}
	}
	for _, o := range list {
		delete(missing, o.UID)
		g.observe(o)
	}
	for uid := range missing {
		e := g.entries[uid]
		e.node.doubt = doubtful
		g.considerDependents(e)
		g.consider(e.node)
	}
	return g.effects()
}

func (g *Graph) observe(o Object) {
	e := g.entry(o.UID)
	n := e.node
	if n != nil && n.Kind != o.Kind {
		return
	}
	first := n == nil
	if first {
		n = &node{entry: e}
		e.node = n
		g.nodes++
	}
	before, doubted := n.Object, n.doubt != certain
	owners := o.Owners
	n.Object, n.doubt = o, certain
	n.Owners = nil
	if first {
		g.arrived(n)
	}
	g.relink(n, owners)
	if first || doubted || before.awaitsOrphaning() != o.awaitsOrphaning() || before.awaitsDependents() != o.awaitsDependents() {
		g.considerDependents(e)
	}
	g.consider(n)
}

// arrived has the references that already pointed at a node's UID know it.
func (g *Graph) arrived(n *node) {
	for _, t := range n.entry.targets {
		if t.observed() == n {
			g.virtual--
			t.state = unknown
		}
		for d := range t.dependents {
			g.warn(d, t)
		}
	}
}

// relink gives a node the edges of its owner references.
func (g *Graph) relink(n *node, owners []Owner) {
	old := n.edges
	if sameOwners(old, owners) && g.linkedRight(n, owners) {
		return
	}
	n.edges = nil
	if len(owners) > 0 {
		n.edges = make([]edge, 0, len(owners))
	}
	for _, o := range owners {
		n.edges = append(n.edges, g.link(n, o))
	}
	g.unlink(n, old)
}

func sameOwners(edges []edge, owners []Owner) bool {
	if len(edges) != len(owners) {
		return false
	}
	for i, e := range edges {
		if e.owner() != owners[i] {
			return false
		}
	}
	return true
}

// linkedRight tells whether the edges lead where they have to, as the kinds are known now.
func (g *Graph) linkedRight(n *node, owners []Owner) bool {
	for i, o := range owners {
		ref, valid := g.place(&n.Object, o)
		if t := n.edges[i].target; t.ref != ref || t.invalid == valid {
			return false
		}
	}
	return true
}

// Remove takes in that an object is gone: a watch saw it go, or the API server said that it is not there any more. It is
// gone for good, as UIDs do not come back. Only its place and UID count.
func (g *Graph) Remove(o Object) Effects {
	e := g.entries[o.UID]
	if e != nil && e.node != nil && e.node.Kind != o.Kind {
		return g.effects() // one of its two faces
	}
	g.gone.add(Ref{Kind: o.Kind, Namespace: o.Namespace, Name: o.Name, UID: o.UID})
	if e != nil {
		g.depart(e, &o, absent)
	}
	return g.effects()
}

// depart takes an observed object out, and lets the references to it know. References to its UID at another place are none
// to it: of those the API server says what they are.
func (g *Graph) depart(e *entry, o *Object, state presence) {
	n := e.node
	e.node = nil
	var there []*target
	for _, t := range e.targets {
		if t.ref.names(o) {
			t.state, t.awaiting = state, false
			there = append(there, t)
			if n != nil {
				g.virtual++
			}
		}
	}
	if n != nil {
		g.nodes--
		edges := n.edges
		n.edges = nil
		g.unlink(n, edges)
	}
	for _, t := range there {
		g.ask(t)
		g.considerDependentsOf(t)
	}
	g.release(e)
}

// Confirm takes in that the API server has an object that was doubtful.
func (g *Graph) Confirm(uid string) Effects {
	if e := g.entries[uid]; e != nil && e.node != nil && e.node.doubt == doubtful {
		e.node.doubt = confirmed
		g.considerDependents(e)
	}
	return g.effects()
}

// Drop takes in that a kind is served no more. Nothing is known of its objects from then on: they cannot hold up anybody's
// deletion, and whoever depends on one stays.
func (g *Graph) Drop(kind Kind) Effects {
	for _, e := range g.entries {
		if e.node != nil && e.node.Kind == kind {
			g.depart(e, &e.node.Object, unknown)
		}
	}
	return g.effects()
}

// Pending is all that there is to do and to warn of, for a collector that did nothing until now.
func (g *Graph) Pending() Effects {
	for _, e := range g.entries {
		if e.node != nil {
			g.consider(e.node)
			for _, edge := range e.node.edges {
				g.warn(e.node, edge.target)
			}
		}
		for _, t := range e.targets {
			g.ask(t)
		}
	}
	return g.effects()
}

// Doomed counts the objects that are to be deleted, as things stand, of those kinds that count.
func (g *Graph) Doomed(counts func(Kind) bool) int {
	n := 0
	for _, e := range g.entries {
		if e.node != nil && counts(e.node.Kind) && g.decide(e.node).Verb == Delete {
			n++
		}
	}
	return n
}

// Found takes in that the API server has the owner that was asked for; o is what it said.
func (g *Graph) Found(r Ref, o Object) Effects {
	return g.answered(r, present, o.awaitsDependents())
}

// Missing takes in that the API server has no such object where the reference points, or another one of the same name.
func (g *Graph) Missing(r Ref) Effects { return g.answered(r, absent, false) }

// Unresolved takes in that the API server does not know the owner's kind. Whoever depends on it stays.
func (g *Graph) Unresolved(r Ref) Effects { return g.answered(r, unresolvable, false) }

func (g *Graph) answered(r Ref, state presence, awaiting bool) Effects {
	if state == absent {
		g.gone.add(r)
	}
	if e := g.entries[r.UID]; e != nil {
		for _, t := range e.targets {
			// What is not there is not there in any version; of what is, another version says nothing.
			sibling := t.ref
			sibling.Version = r.Version
			if t.ref == r || state == absent && sibling == r {
				t.state, t.awaiting = state, awaiting
				g.considerDependentsOf(t)
			}
		}
	}
	return g.effects()
}
