package graph

import "slices"

// State is how an object stands with the collector.
type State string

// The states.
const (
	// Free: it has no owner, so that nothing but a request deletes it.
	Free State = "Free"
	// Owned: an owner keeps it.
	Owned State = "Owned"
	// Unclear: of an owner it is not known whether it is there. It is left alone.
	Unclear State = "Unclear"
	// Doomed: its owners are gone or wait for it, and it is about to be deleted.
	Doomed State = "Doomed"
	// AwaitsDependents: it is being deleted, after the dependents that block it.
	AwaitsDependents State = "AwaitsDependents"
	// AwaitsOrphaning: it is being deleted, after its dependents were taken from it.
	AwaitsOrphaning State = "AwaitsOrphaning"
	// AwaitsFinalizers: it is being deleted, after others have taken their finalizers away.
	AwaitsFinalizers State = "AwaitsFinalizers"
	// Terminating: it is being deleted, and no finalizer is in the way.
	Terminating State = "Terminating"
)

// Standing is what an owner reference amounts to.
type Standing string

// The standings.
const (
	// Solid: the owner is there.
	Solid Standing = "Solid"
	// Dangling: the owner is gone.
	Dangling Standing = "Dangling"
	// Waiting: the owner is being deleted in the foreground.
	Waiting Standing = "Waiting"
	// Orphaning: the owner is being deleted and leaves its dependents behind.
	Orphaning Standing = "Orphaning"
	// Unverified: it is being found out.
	Unverified Standing = "Unverified"
	// Unresolvable: the API server does not know its kind.
	Unresolvable Standing = "Unresolvable"
	// NoReference: it is malformed, or of an object without a namespace to one in a namespace.
	NoReference Standing = "NoReference"
)

func (e edge) standing() Standing {
	switch e.fate() {
	case solid:
		return Solid
	case dangling:
		return Dangling
	case waiting:
		return Waiting
	case orphaning:
		return Orphaning
	case invalid:
		return NoReference
	}
	if e.target.state == unresolvable {
		return Unresolvable
	}
	return Unverified
}

// OwnerView is an owner as a dependent sees it.
type OwnerView struct {
	Owner Owner
	// Namespace in which the owner is looked for; empty for kinds without.
	Namespace string
	Standing  Standing
}

// Explanation is why an object is kept, waits or goes.
type Explanation struct {
	Object Object
	State  State
	Owners []OwnerView
	// Path leads from the object's owner up to one that has none, by owners that keep it. It ends early at an owner that was
	// not observed, and in a cycle.
	Path []Object
	// Blockers are dependents that hold the object's deletion up: those that block a foreground deletion, or are not orphaned
	// yet. BlockerCount is how many there are; Blockers has at most as many as was asked for, ordered by UID.
	Blockers     []Object
	BlockerCount int
	// Finalizers are those in the way that others have to take away.
	Finalizers []string
	// Next is what the collector does next.
	Next Action
}

// Explain explains an observed object, with up to limit blockers.
func (g *Graph) Explain(uid string, limit int) (Explanation, bool) {
	e := g.entries[uid]
	if e == nil || e.node == nil {
		return Explanation{}, false
	}
	n := e.node
	x := Explanation{Object: n.object(), Next: g.decide(n), State: g.state(n)}
	for _, e := range n.edges {
		x.Owners = append(x.Owners, OwnerView{e.owner(), e.target.ref.Namespace, e.standing()})
	}
	x.Path = path(n)
	if n.Deleting {
		blockers := n.blockers()
		x.BlockerCount = len(blockers)
		for _, b := range blockers[:min(limit, len(blockers))] {
			x.Blockers = append(x.Blockers, b.object())
		}
		for _, f := range n.Finalizers {
			if f != FinalizerOrphan && f != FinalizerForeground {
				x.Finalizers = append(x.Finalizers, f)
			}
		}
	}
	return x, true
}

func (g *Graph) state(n *node) State {
	switch {
	case n.awaitsOrphaning():
		return AwaitsOrphaning
	case n.awaitsDependents():
		return AwaitsDependents
	case n.Deleting && len(n.Finalizers) > 0:
		return AwaitsFinalizers
	case n.Deleting:
		return Terminating
	case len(n.edges) == 0:
		return Free
	}
	if g.decide(n).Verb == Delete {
		return Doomed
	}
	if slices.ContainsFunc(n.edges, func(e edge) bool { return e.fate() == solid || e.fate() == orphaning }) {
		return Owned
	}
	return Unclear
}

func path(n *node) []Object {
	var out []Object
	seen := map[*node]bool{n: true}
	for {
		i := slices.IndexFunc(n.edges, func(e edge) bool { return e.fate() == solid && e.target.observed() != nil })
		if i < 0 {
			return out
		}
		n = n.edges[i].target.observed()
		if seen[n] {
			return out
		}
		seen[n] = true
		out = append(out, n.object())
	}
}

// blockers are the dependents that hold a deletion up, ordered by UID.
func (n *node) blockers() []*node {
	var out []*node
	for _, t := range n.entry.targets {
		if !t.ref.names(&n.Object) {
			continue
		}
		for d := range t.dependents {
			blocks := func(e edge) bool {
				return e.target == t && (n.awaitsOrphaning() || n.awaitsDependents() && e.block == True)
			}
			if slices.ContainsFunc(d.edges, blocks) && !slices.Contains(out, d) {
				out = append(out, d)
			}
		}
	}
	slices.SortFunc(out, byUID)
	return out
}
