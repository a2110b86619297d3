package graph

import "slices"

// Verb is the kind of an action.
type Verb uint8

// The verbs. A write is bound to the UID and the resource version for which it was decided.
const (
	// Keep: do nothing.
	Keep Verb = iota
	// Lookup: ask the API server for the owner Ref, and call Found, Missing or Unresolved. If it was found and is not
	// watched, ask again later.
	Lookup
	// Verify: ask the API server for the Object, and call Confirm or Remove. If it exists, ask again later.
	Verify
	// Delete: delete the Object with Policy.
	Delete
	// Patch: set the Object's owner references to Owners, a subset of the present ones.
	Patch
	// Finalize: remove Finalizer from the Object, which is being deleted.
	Finalize
)

// Cause is the reason for an action, for logs and metrics.
type Cause string

// The causes.
const (
	// OwnersGone: all of its owners are deleted, or wait for its deletion.
	OwnersGone Cause = "owners-gone"
	// OwnersWait: an owner is being deleted in the foreground and waits for it, and it has dependents of its own.
	OwnersWait Cause = "owners-wait"
	// DanglingOwners: some of its owners are deleted or being deleted, but not all.
	DanglingOwners Cause = "dangling-owners"
	// Orphaned: an owner is deleted with the policy Orphan.
	Orphaned Cause = "orphaned"
	// WaitCycle: it waits for dependents that, directly or not, wait for it.
	WaitCycle Cause = "wait-cycle"
	// DependentsGone: no dependent blocks its foreground deletion.
	DependentsGone Cause = "dependents-gone"
	// DependentsOrphaned: no dependent refers to it.
	DependentsOrphaned Cause = "dependents-orphaned"
	// Doubtful: a list no longer contains it.
	Doubtful Cause = "doubtful"
	// NotObserved: it is referred to but was not observed.
	NotObserved Cause = "not-observed"
)

// Action is the next step for an item. Its fields are copies.
type Action struct {
	Verb      Verb
	Cause     Cause
	Object    Object
	Policy    Policy
	Owners    []Owner
	Finalizer string
	Ref       Ref

	orphaning bool
}

// Decide returns what to do with an item now, which may be nothing because the graph has changed since it was queued. live, if
// not nil, is the object as the API server returned it after a conflict; it takes precedence over what was observed.
func (g *Graph) Decide(i Item, live *Object) Action {
	if i.UID == "" {
		return g.decideOwner(i.Owner)
	}
	e := g.entries[i.UID]
	if e == nil || e.node == nil {
		return Action{}
	}
	if live == nil || live.UID != i.UID {
		return e.node.decide()
	}
	// A node for live outside the graph: edges to targets without other dependents are unknown, so they keep it.
	now := &node{Object: *live, entry: e}
	now.Owners = nil
	for _, o := range live.Owners {
		now.edges = append(now.edges, g.peek(now, o))
	}
	return now.decide()
}

func (g *Graph) decideOwner(r Ref) Action {
	t := g.entries.lookup(r)
	if t == nil || t.invalid || len(t.dependents) == 0 || t.observed() != nil || t.state == absent || t.state == unresolvable {
		return Action{}
	}
	return Action{Verb: Lookup, Cause: NotObserved, Ref: r}
}

func (n *node) decide() Action {
	switch {
	case n.doubt != certain:
		return Action{Verb: Verify, Cause: Doubtful, Object: n.object()}
	case n.awaitsOrphaning():
		if a := n.sever(); a.Verb != Keep {
			return a
		}
		return n.orphan()
	case n.awaitsDependents():
		if a := n.sever(); a.Verb != Keep {
			return a
		}
		return n.await()
	case len(n.edges) == 0:
		return Action{}
	case n.Deleting:
		return n.sever()
	default:
		return n.collect()
	}
}

// sever removes the references to orphaning owners from a dependent. It applies to an object that is being deleted too;
// otherwise its owner would have to wait until the object is deleted.
func (n *node) sever() Action {
	if !slices.ContainsFunc(n.edges, func(e edge) bool { return e.fate() == orphaning }) {
		return Action{}
	}
	return n.without(Orphaned, orphaning)
}

// orphan finalizes an owner once no dependent refers to it. Each dependent is an item of its own.
func (n *node) orphan() Action {
	if n.hasDependents() {
		return Action{}
	}
	return Action{Verb: Finalize, Cause: DependentsOrphaned, Object: n.object(), Finalizer: FinalizerOrphan, orphaning: true}
}

// await finalizes an owner once no dependent blocks it.
func (n *node) await() Action {
	if n.blocked() == 0 {
		return Action{Verb: Finalize, Cause: DependentsGone, Object: n.object(), Finalizer: FinalizerForeground}
	}
	// An object that waits for itself stops blocking its owners: a cycle has no right order.
	cyclic := false
	owners := make([]Owner, 0, len(n.edges))
	for _, e := range n.edges {
		o := e.owner()
		if e.blocks() && leadsTo(e.target.observed(), n.UID, map[string]bool{}) {
			o.Block, cyclic = False, true
		}
		owners = append(owners, o)
	}
	if !cyclic {
		return Action{}
	}
	return Action{Verb: Patch, Cause: WaitCycle, Object: n.object(), Owners: owners}
}

// leadsTo reports whether from, or a waiting object that transitively waits for from, has the UID.
func leadsTo(from *node, uid string, seen map[string]bool) bool {
	if from.UID == uid {
		return true
	}
	if seen[from.UID] {
		return false
	}
	seen[from.UID] = true
	for _, e := range from.edges {
		if e.blocks() && leadsTo(e.target.observed(), uid, seen) {
			return true
		}
	}
	return false
}

// blocks reports whether an observed owner waits for the dependent.
func (e edge) blocks() bool {
	owner := e.target.observed()
	return e.block == True && owner != nil && owner.awaitsDependents()
}

// collect decides about an object that is not being deleted.
func (n *node) collect() Action {
	var count [fates]int
	for _, e := range n.edges {
		count[e.fate()]++
	}
	switch {
	case count[orphaning] > 0:
		// Dangling references are removed in the same patch, so that orphaning does not depend on the order of events.
		return n.without(Orphaned, orphaning, dangling, waiting)
	case count[invalid] > 0 || count[open] > 0:
		return Action{}
	case count[solid] > 0 && count[dangling]+count[waiting] > 0:
		return n.without(DanglingOwners, dangling, waiting)
	case count[solid] > 0:
		return Action{}
	case count[waiting] > 0 && n.hasDependents() && n.policy() != Orphan:
		return Action{Verb: Delete, Cause: OwnersWait, Object: n.object(), Policy: Foreground}
	default:
		return Action{Verb: Delete, Cause: OwnersGone, Object: n.object(), Policy: n.policy()}
	}
}

// without returns the patch that removes the references with the given fates.
func (n *node) without(why Cause, gone ...fate) Action {
	a := Action{Verb: Patch, Cause: why, Object: n.object(), Owners: []Owner{}, orphaning: why == Orphaned}
	for _, e := range n.edges {
		if !slices.Contains(gone, e.fate()) {
			a.Owners = append(a.Owners, e.owner())
		}
	}
	return a
}

// fate is what an owner reference implies for the dependent.
type fate uint8

const (
	// open: whether the owner exists is not known.
	open fate = iota
	// invalid: no object can be the owner. The dependent is not touched.
	invalid
	// solid: the owner exists and is not being deleted in a way that concerns its dependents.
	solid
	// dangling: the owner does not exist.
	dangling
	// waiting: the owner is being deleted in the foreground.
	waiting
	// orphaning: the owner is being deleted with the policy Orphan.
	orphaning
	fates
)

func (e edge) fate() fate {
	t := e.target
	if t.invalid {
		return invalid
	}
	if n := t.observed(); n != nil {
		switch {
		case n.doubt == doubtful:
			return open
		case n.awaitsOrphaning():
			return orphaning
		case n.awaitsDependents():
			return waiting
		}
		return solid
	}
	switch {
	case t.state == absent:
		return dangling
	case t.state == present && t.awaiting:
		return waiting
	case t.state == present:
		return solid
	}
	return open
}

// hasDependents reports whether any observed object refers to this one.
func (n *node) hasDependents() bool {
	return slices.ContainsFunc(n.entry.targets, func(t *target) bool { return t.ref.names(&n.Object) && len(t.dependents) > 0 })
}

// blocked returns the number of references that block a foreground deletion.
func (n *node) blocked() int {
	count := 0
	for _, t := range n.entry.targets {
		if t.ref.names(&n.Object) {
			count += t.blocking
		}
	}
	return count
}
