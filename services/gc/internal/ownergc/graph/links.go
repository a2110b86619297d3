package graph

import "slices"

// links are the owner references of all observed objects: the targets that they lead to, and the edges between both. A change
// puts what it makes due into pending.
type links struct {
	entries entries
	scopes  map[Kind]Scope
	gone    memory
	// virtual is the number of targets that match no observed node, edges that of references.
	virtual, edges int
	pending        pending
}

// refOf returns what an owner reference of an object points at, and whether an object can be there.
func (l *links) refOf(of *Object, o Owner) (r Ref, valid bool) {
	r = Ref{Kind: o.Kind, Version: o.Version, Namespace: of.Namespace, Name: o.Name, UID: o.UID}
	scope := l.scopes[o.Kind]
	if scope == ScopeCluster {
		r.Namespace = ""
	}
	return r, !r.malformed() && (scope != ScopeNamespaced || of.Namespace != "")
}

// link creates the edge of an owner reference.
func (l *links) link(n *node, o Owner) edge {
	ref, valid := l.refOf(&n.Object, o)
	t := l.entries.lookup(ref)
	if t == nil {
		e := l.entries.get(ref.UID)
		t = &target{ref: ref, entry: e, dependents: map[*node]struct{}{}}
		if l.gone.has(ref) {
			t.state = absent
		}
		e.targets = append(e.targets, t)
		if t.observed() == nil {
			l.virtual++
		}
	}
	t.invalid = !valid // the scope of the kind may have changed
	t.dependents[n] = struct{}{}
	if o.Block == True {
		t.blocking++
	}
	l.edges++
	l.pending.warn(n, t)
	l.pending.ask(t)
	return edge{target: t, block: o.Block, controller: o.Controller}
}

// unlink removes edges, and reconsiders the owners that may have waited for that.
func (l *links) unlink(n *node, edges []edge) {
	for _, e := range edges {
		t := e.target
		// A reference may occur twice; then the node remains a dependent by the other edge.
		if !slices.ContainsFunc(n.edges, func(other edge) bool { return other.target == t }) {
			delete(t.dependents, n)
		}
		if e.block == True {
			t.blocking--
		}
		l.edges--
		if owner := t.observed(); owner != nil && owner.Deleting {
			l.pending.consider(owner)
		}
		if len(t.dependents) == 0 {
			l.dismiss(t)
		}
	}
}

// dismiss drops a target without dependents.
func (l *links) dismiss(t *target) {
	i := slices.Index(t.entry.targets, t)
	if i < 0 {
		return // it was dismissed by the other of two edges
	}
	if t.observed() == nil {
		l.virtual--
	}
	t.entry.targets = slices.Delete(t.entry.targets, i, i+1)
	if t.state == absent {
		l.gone.add(t.ref)
	}
	l.entries.release(t.entry)
}

// arrived updates the references that already pointed at a node's UID.
func (l *links) arrived(n *node) {
	for _, t := range n.entry.targets {
		if t.observed() == n {
			l.virtual--
			t.state = unknown
		}
		for d := range t.dependents {
			l.pending.warn(d, t)
		}
	}
}

// relink replaces the edges of a node by those of its owner references.
func (l *links) relink(n *node, owners []Owner) {
	old := n.edges
	if sameOwners(old, owners) && l.linkedRight(n, owners) {
		return
	}
	n.edges = nil
	if len(owners) > 0 {
		n.edges = make([]edge, 0, len(owners))
	}
	for _, o := range owners {
		n.edges = append(n.edges, l.link(n, o))
	}
	l.unlink(n, old)
}

// linkedRight reports whether the edges lead to the right targets for the kinds that are known now.
func (l *links) linkedRight(n *node, owners []Owner) bool {
	for i, o := range owners {
		ref, valid := l.refOf(&n.Object, o)
		if t := n.edges[i].target; t.ref != ref || t.invalid == valid {
			return false
		}
	}
	return true
}

// peek is link without changes to the graph.
func (l *links) peek(n *node, o Owner) edge {
	ref, valid := l.refOf(&n.Object, o)
	t := l.entries.lookup(ref)
	if t == nil {
		e := l.entries[ref.UID]
		if e == nil {
			e = &entry{uid: ref.UID}
		}
		t = &target{ref: ref, entry: e, invalid: !valid}
		if l.gone.has(ref) {
			t.state = absent
		}
	}
	return edge{target: t, block: o.Block, controller: o.Controller}
}
