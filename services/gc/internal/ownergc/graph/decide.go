package graph

import "slices"

// Verb is what is to be done.
type Verb uint8

// The verbs. All that write are bound to the object's UID and resource version: what was decided holds for that one alone.
const (
	// Keep: nothing.
	Keep Verb = iota
	// Lookup: ask the API server for the owner Ref, and tell Found, Missing or Unresolved. If it was found and nobody
	// watches it, ask again after a while.
	Lookup
	// Verify: ask the API server for the Object, and tell Confirm or Remove. If it is there, ask again after a while.
	Verify
	// Delete: delete the Object with Policy.
	Delete
	// Patch: give the Object the Owners. None of them is new.
	Patch
	// Finalize: take Finalizer from the Object, which is being deleted.
	Finalize
)

// Cause says why something is to be done, for logs and metrics.
type Cause string

// The causes.
const (
	// OwnersGone: all of its owners are, or they wait for it to go.
	OwnersGone Cause = "owners-gone"
	// OwnersWait: an owner is being deleted in the foreground and waits for it, and it has dependents of its own.
	OwnersWait Cause = "owners-wait"
	// DanglingOwners: some of its owners are gone or going, but not all.
	DanglingOwners Cause = "dangling-owners"
	// Orphaned: an owner is deleted and leaves it behind.
	Orphaned Cause = "orphaned"
	// WaitCycle: it waits for dependents that, by some way, wait for it.
	WaitCycle Cause = "wait-cycle"
	// DependentsGone: nothing blocks its foreground deletion any more.
	DependentsGone Cause = "dependents-gone"
	// DependentsOrphaned: no dependent refers to it any more.
	DependentsOrphaned Cause = "dependents-orphaned"
	// Doubtful: a list did not have it any more.
	Doubtful Cause = "doubtful"
	// NotObserved: it is referred to, and was not seen.
	NotObserved Cause = "not-observed"
)

// Action is what to do next with an item. What it carries is a copy.
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

// Decide says what to do with an item now; it may well be nothing, for the graph may have moved on. live, if not nil, is
// the object as the API server just showed it, and is believed over what was observed: for a write that came too late.
func (g *Graph) Decide(i Item, live *Object) Action {
	if i.UID == "" {
		return g.decideOwner(i.Owner)
	}
	e := g.entries[i.UID]
	if e == nil || e.node == nil {
		return Action{}
	}
	if live == nil || live.UID != i.UID {
		return g.decide(e.node)
	}
	// The node as it is now, beside the graph: edges to targets that nobody else points at are unknown, and so keep it.
	now := &node{Object: *live, entry: e}
	now.Owners = nil
	for _, o := range live.Owners {
		now.edges = append(now.edges, g.peek(now, o))
	}
	return g.decide(now)
}

// peek is link without a trace.
func (g *Graph) peek(n *node, o Owner) edge {
	ref, valid := g.place(&n.Object, o)
	t := g.lookup(ref)
	if t == nil {
		e := g.entries[ref.UID]
		if e == nil {
			e = &entry{uid: ref.UID}
		}
		t = &target{ref: ref, entry: e, invalid: !valid}
		if g.gone.has(ref) {
			t.state = absent
		}
	}
	return edge{target: t, block: o.Block, controller: o.Controller}
}

func (g *Graph) decideOwner(r Ref) Action {
	t := g.lookup(r)
	if t == nil || t.invalid || len(t.dependents) == 0 || t.observed() != nil || t.state == absent || t.state == unresolvable {
		return Action{}
	}
	return Action{Verb: Lookup, Cause: NotObserved, Ref: r}
}

func (g *Graph) decide(n *node) Action {
	switch {
	case n.doubt != certain:
		return Action{Verb: Verify, Cause: Doubtful, Object: n.object()}
	case n.awaitsOrphaning():
		if a := g.sever(n); a.Verb != Keep {
			return a
		}
		return g.orphan(n)
	case n.awaitsDependents():
		if a := g.sever(n); a.Verb != Keep {
			return a
		}
		return g.await(n)
	case len(n.edges) == 0:
		return Action{}
	case n.Deleting:
		return g.sever(n)
	default:
		return g.collect(n)
	}
}

// sever takes the references to owners from a dependent that they leave behind. It is done for an object that is itself
// being deleted, too, or its owner would have to wait for its end.
func (g *Graph) sever(n *node) Action {
	if !slices.ContainsFunc(n.edges, func(e edge) bool { return e.fate() == orphaning }) {
		return Action{}
	}
	return n.without(Orphaned, orphaning)
}

// orphan lets an owner go once all its dependents were taken from it. Each of them is an item of its own.
func (g *Graph) orphan(n *node) Action {
	if n.hasDependents() {
		return Action{}
	}
	return Action{Verb: Finalize, Cause: DependentsOrphaned, Object: n.object(), Finalizer: FinalizerOrphan, orphaning: true}
}

// await lets an owner go once no dependent blocks it.
func (g *Graph) await(n *node) Action {
	if n.blocked() == 0 {
		return Action{Verb: Finalize, Cause: DependentsGone, Object: n.object(), Finalizer: FinalizerForeground}
	}
	// Who waits for itself lets its owners go: in a cycle there is no right order.
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

// leadsTo tells whether an object that waits for its dependents, or one that waits for it, and so on, has the UID.
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

// blocks tells whether an observed owner waits for the dependent.
func (e edge) blocks() bool {
	owner := e.target.observed()
	return e.block == True && owner != nil && owner.awaitsDependents()
}

// collect decides about an object that nobody has deleted.
func (g *Graph) collect(n *node) Action {
	var count [fates]int
	for _, e := range n.edges {
		count[e.fate()]++
	}
	switch {
	case count[orphaning] > 0:
		// What is gone goes along with it, so that being left behind does not depend on the order.
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

// without is the patch that takes the references of some fates away.
func (n *node) without(why Cause, gone ...fate) Action {
	a := Action{Verb: Patch, Cause: why, Object: n.object(), Owners: []Owner{}, orphaning: why == Orphaned}
	for _, e := range n.edges {
		if !slices.Contains(gone, e.fate()) {
			a.Owners = append(a.Owners, e.owner())
		}
	}
	return a
}

// fate is what an owner means to a dependent.
type fate uint8

const (
	// open: nobody knows yet, or nobody can.
	open fate = iota
	// invalid: the reference can point at nothing. Its object is left alone.
	invalid
	// solid: the owner is there, and stays as far as its dependents are concerned.
	solid
	// dangling: the owner is gone.
	dangling
	// waiting: the owner is being deleted in the foreground.
	waiting
	// orphaning: the owner is being deleted, and leaves its dependents behind.
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

// hasDependents tells whether any observed object refers to this one.
func (n *node) hasDependents() bool {
	return slices.ContainsFunc(n.entry.targets, func(t *target) bool { return t.ref.names(&n.Object) && len(t.dependents) > 0 })
}

// blocked is the number of references that keep a foreground deletion from its end.
func (n *node) blocked() int {
	count := 0
	for _, t := range n.entry.targets {
		if t.ref.names(&n.Object) {
			count += t.blocking
		}
	}
	return count
}
