package graph

// Kinds updates the known kinds and their scopes. Kinds that scopes does not contain keep their scope. Owners of unknown kinds
// are looked up again.
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
				g.pending.ask(t)
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
		g.pending.consider(n)
	}
	return g.pending.take()
}

// Observe records an object from a list or watch. It is idempotent. One object that two API groups serve has one UID and two
// kinds; the kind that was observed first stays.
func (g *Graph) Observe(o Object) Effects {
	g.observe(o)
	return g.pending.take()
}

// List records a complete list of a kind atomically, so that no owner seems to have no dependents because they come later in
// the list. Objects of the kind that are missing in the list without a watch event become doubtful until the API server
// confirms their deletion or they are observed again. Until then they own and block as before, but nothing is deleted
// because of them.
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
		g.pending.considerDependents(e)
		g.pending.consider(e.node)
	}
	return g.pending.take()
}

func (g *Graph) observe(o Object) {
	e := g.entries.get(o.UID)
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
		g.pending.considerDependents(e)
	}
	g.pending.consider(n)
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

// Remove records that an object is deleted: a watch reported it, or the API server did not find it. UIDs are never reused, so
// this is final. Only the kind, namespace, name and UID of o count.
func (g *Graph) Remove(o Object) Effects {
	e := g.entries[o.UID]
	if e != nil && e.node != nil && e.node.Kind != o.Kind {
		return g.pending.take() // it was observed as another kind
	}
	g.gone.add(Ref{Kind: o.Kind, Namespace: o.Namespace, Name: o.Name, UID: o.UID})
	if e != nil {
		g.depart(e, &o, absent)
	}
	return g.pending.take()
}

// depart removes an observed object and updates the references to it. References to its UID with another kind, namespace or
// name are not affected: the API server is asked about those.
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
		g.pending.ask(t)
		g.pending.considerDependentsOf(t)
	}
	g.entries.release(e)
}

// Confirm records that the API server has an object that was doubtful.
func (g *Graph) Confirm(uid string) Effects {
	if e := g.entries[uid]; e != nil && e.node != nil && e.node.doubt == doubtful {
		e.node.doubt = confirmed
		g.pending.considerDependents(e)
	}
	return g.pending.take()
}

// Drop records that a kind is no longer served. Its objects become unknown: they no longer block a deletion, and their
// dependents are kept.
func (g *Graph) Drop(kind Kind) Effects {
	for _, e := range g.entries {
		if e.node != nil && e.node.Kind == kind {
			g.depart(e, &e.node.Object, unknown)
		}
	}
	return g.pending.take()
}

// Pending returns all items and warnings, for a collector that was not permitted to act until now.
func (g *Graph) Pending() Effects {
	for _, e := range g.entries {
		if e.node != nil {
			g.pending.consider(e.node)
			for _, edge := range e.node.edges {
				g.pending.warn(e.node, edge.target)
			}
		}
		for _, t := range e.targets {
			g.pending.ask(t)
		}
	}
	return g.pending.take()
}

// Doomed returns the number of objects of the selected kinds that would be deleted now.
func (g *Graph) Doomed(counts func(Kind) bool) int {
	n := 0
	for _, e := range g.entries {
		if e.node != nil && counts(e.node.Kind) && e.node.decide().Verb == Delete {
			n++
		}
	}
	return n
}

// Found records that the API server has the owner that was looked up; o is the answer.
func (g *Graph) Found(r Ref, o Object) Effects {
	return g.answered(r, present, o.awaitsDependents())
}

// Missing records that the API server has no such owner, or one with another UID.
func (g *Graph) Missing(r Ref) Effects { return g.answered(r, absent, false) }

// Unresolved records that the API server does not serve the owner's kind. Its dependents are kept.
func (g *Graph) Unresolved(r Ref) Effects { return g.answered(r, unresolvable, false) }

func (g *Graph) answered(r Ref, state presence, awaiting bool) Effects {
	if state == absent {
		g.gone.add(r)
	}
	if e := g.entries[r.UID]; e != nil {
		for _, t := range e.targets {
			// An owner that does not exist in one version exists in none; an owner that exists says nothing about other references.
			sibling := t.ref
			sibling.Version = r.Version
			if t.ref == r || state == absent && sibling == r {
				t.state, t.awaiting = state, awaiting
				g.pending.considerDependentsOf(t)
			}
		}
	}
	return g.pending.take()
}
