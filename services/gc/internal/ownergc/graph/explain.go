package graph

import "slices"

// State is the state of an object as the collector sees it.
type State string

// The states.
const (
	// Free: it has no owner. The collector never deletes it.
	Free State = "Free"
	// Owned: at least one owner exists and keeps it.
	Owned State = "Owned"
	// Unclear: whether one of its owners exists is not known. It is not touched.
	Unclear State = "Unclear"
	// Doomed: its owners are deleted or wait for its deletion, and it is about to be deleted.
	Doomed State = "Doomed"
	// AwaitsDependents: it is being deleted and waits for the dependents that block its deletion.
	AwaitsDependents State = "AwaitsDependents"
	// AwaitsOrphaning: it is being deleted and waits until its dependents no longer refer to it.
	AwaitsOrphaning State = "AwaitsOrphaning"
	// AwaitsFinalizers: it is being deleted and waits for the finalizers of other components.
	AwaitsFinalizers State = "AwaitsFinalizers"
	// Terminating: it is being deleted, and has no finalizers.
	Terminating State = "Terminating"
)

// RefStatus is the status of an owner reference.
type RefStatus string

// The statuses.
const (
	// Solid: the owner exists.
	Solid RefStatus = "Solid"
	// Dangling: the owner does not exist.
	Dangling RefStatus = "Dangling"
	// Waiting: the owner is being deleted in the foreground.
	Waiting RefStatus = "Waiting"
	// Orphaning: the owner is being deleted with the policy Orphan.
	Orphaning RefStatus = "Orphaning"
	// Unverified: the API server has not been asked yet.
	Unverified RefStatus = "Unverified"
	// Unresolvable: the API server does not serve the owner's kind in this version.
	Unresolvable RefStatus = "Unresolvable"
	// NoReference: it is malformed, or leads from a cluster-scoped object to a namespaced one.
	NoReference RefStatus = "NoReference"
)

func (e edge) status() RefStatus {
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

// OwnerView is an owner reference and its status.
type OwnerView struct {
	Owner Owner
	// Namespace in which the owner is looked up; empty for cluster-scoped kinds.
	Namespace string
	Status    RefStatus
}

// Explanation says why an object is kept, waits, or is deleted.
type Explanation struct {
	Object Object
	State  State
	Owners []OwnerView
	// Path is the chain of existing owners, from the object's owner up to one that has no owner. It ends early at an owner that
	// was not observed, and in a cycle.
	Path []Object
	// Blockers are the dependents that block the object's deletion: they block a foreground deletion, or are not orphaned yet.
	// BlockerCount is their number; Blockers holds at most the requested number, ordered by UID.
	Blockers     []Object
	BlockerCount int
	// Finalizers are those that other components must remove first.
	Finalizers []string
	// Next is the next action of the collector.
	Next Action
}

// Explain explains an observed object, with up to limit blockers.
func (g *Graph) Explain(uid string, limit int) (Explanation, bool) {
	e := g.entries[uid]
	if e == nil || e.node == nil {
		return Explanation{}, false
	}
	n := e.node
	x := Explanation{Object: n.object(), Next: n.decide(), State: n.state()}
	for _, e := range n.edges {
		x.Owners = append(x.Owners, OwnerView{e.owner(), e.target.ref.Namespace, e.status()})
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

func (n *node) state() State {
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
	if n.decide().Verb == Delete {
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

// blockers returns the dependents that block a deletion, ordered by UID.
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
