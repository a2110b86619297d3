// Package graph is the pure core of the owner-reference garbage collector (seed 004, and the Kubernetes documentation of
// cascading deletion). It records observations (objects that were added, changed and deleted; what the API server answered
// about an owner) and decides what to do next with an object. It deletes nothing, keeps no time and has no client. It never
// guesses: an owner counts as deleted only if a watch reported the deletion of its UID, or the API server did not find it
// where a reference points.
//
// Owner references are edges to targets. References to one UID that disagree about its kind, namespace or name lead to
// different targets, each with its own fate; the observed object matches at most one of them.
//
//	dependent --edge--> target (kind, namespace, name, UID) --- entry (UID) --- node, if an object with that UID was observed
//
//	the state of a target that matches no observed node:
//	          Found            Missing, or a watch reported the deletion of the UID
//	unknown --------> present ----------> absent
//	   ^ |               |                           in each state the target matches a node once that is observed
//	   | +-> unresolvable (no such kind)
//	   +---- Kinds, Drop (the knowledge is outdated)
//
// A Graph is not safe for concurrent use; the caller holds a lock. No method blocks or does I/O.
package graph

import "slices"

// Graph is the dependency graph. Create it with New.
type Graph struct {
	entries entries
	scopes  map[Kind]Scope
	gone    memory
	nodes   int
	virtual int
	edges   int
	pending pending
}

// entry is everything that is known about one UID.
type entry struct {
	uid     string
	node    *node // nil if no such object was observed
	targets []*target
}

// node is an observed object. Its owner references are stored as edges.
type node struct {
	Object // without Owners
	edges  []edge
	entry  *entry
	doubt  doubt
}

type edge struct {
	target            *target
	block, controller Flag
}

// doubt is the certainty that an object exists. A list that lacks it, without a watch event, makes it doubtful.
type doubt uint8

const (
	certain doubt = iota
	doubtful
	confirmed // the API server has it; the watch will show it too
)

type presence uint8

const (
	unknown presence = iota
	present
	absent
	unresolvable
)

type target struct {
	ref   Ref
	entry *entry
	// state and awaiting (a foreground deletion) are from the API server's answer; an observed node takes precedence.
	state    presence
	awaiting bool
	// invalid reports that no object can be the target: see Effects.Invalid and Ref.malformed.
	invalid    bool
	dependents map[*node]struct{}
	blocking   int // the number of edges that block the owner's deletion
}

// observed returns the node that the target matches, or nil.
func (t *target) observed() *node {
	if n := t.entry.node; n != nil && t.ref.names(&n.Object) {
		return n
	}
	return nil
}

// Effects are the consequences of an event.
type Effects struct {
	// Items are to be processed: Decide returns what to do. An item may have been queued before.
	Items []Item
	// Invalid are references to an owner in another namespace. They deserve a Warning Event.
	Invalid []Invalid
}

// Invalid is an owner reference across namespaces, or from a cluster-scoped object to a namespaced one.
type Invalid struct {
	Dependent Object
	Owner     Ref
}

// Item is a unit of work: an object if UID is set, otherwise an owner that was not observed. It is comparable.
type Item struct {
	UID   string
	Owner Ref
	// Orphan selects the queue for orphaning.
	Orphan bool
}

// New returns an empty graph. It remembers up to remember deleted owners beyond those that have dependents.
func New(remember int) *Graph {
	return &Graph{entries: entries{}, scopes: map[Kind]Scope{}, gone: newMemory(remember), pending: pending{queued: map[Item]struct{}{}}}
}

// Size is the size of the graph.
type Size struct{ Objects, Virtual, References int }

// Size returns the number of observed objects, of owners that were not observed, and of owner references.
func (g *Graph) Size() Size { return Size{Objects: g.nodes, Virtual: g.virtual, References: g.edges} }

// pending gathers the effects of one event.
type pending struct {
	effects Effects
	queued  map[Item]struct{}
}

// take returns what has been gathered since its last call.
func (p *pending) take() Effects {
	fx := p.effects
	p.effects = Effects{}
	clear(p.queued)
	return fx
}

// queue adds an item, once.
func (p *pending) queue(i Item) {
	if _, ok := p.queued[i]; !ok {
		p.queued[i] = struct{}{}
		p.effects.Items = append(p.effects.Items, i)
	}
}

// consider queues a node if there is an action for it.
func (g *Graph) consider(n *node) {
	if n.entry.node != n {
		return // it was removed
	}
	if a := n.decide(); a.Verb != Keep {
		g.pending.queue(Item{UID: n.UID, Orphan: a.orphaning})
	}
}

func (g *Graph) considerDependents(e *entry) {
	for _, t := range e.targets {
		g.considerDependentsOf(t)
	}
}

func (g *Graph) considerDependentsOf(t *target) {
	for d := range t.dependents {
		g.consider(d)
	}
}

// ask queues a target that needs a lookup.
func (g *Graph) ask(t *target) {
	if t.asks() {
		g.pending.queue(Item{Owner: t.ref})
	}
}

// asks reports whether the API server has to be asked for the target.
func (t *target) asks() bool {
	return len(t.dependents) > 0 && !t.invalid && t.state == unknown && t.observed() == nil
}

// entries are all UIDs that an object or a reference has.
type entries map[string]*entry

// get returns the entry of a UID, and creates it if necessary.
func (all entries) get(uid string) *entry {
	e := all[uid]
	if e == nil {
		e = &entry{uid: uid}
		all[uid] = e
	}
	return e
}

// release drops an entry without node and targets.
func (all entries) release(e *entry) {
	if e.node == nil && len(e.targets) == 0 {
		delete(all, e.uid)
	}
}

// lookup returns the target of a reference, or nil.
func (all entries) lookup(r Ref) *target {
	if e := all[r.UID]; e != nil {
		for _, t := range e.targets {
			if t.ref == r {
				return t
			}
		}
	}
	return nil
}

// refOf returns what an owner reference of an object points at, and whether an object can be there.
func (g *Graph) refOf(of *Object, o Owner) (r Ref, valid bool) {
	r = Ref{Kind: o.Kind, Version: o.Version, Namespace: of.Namespace, Name: o.Name, UID: o.UID}
	scope := g.scopes[o.Kind]
	if scope == ScopeCluster {
		r.Namespace = ""
	}
	return r, !r.malformed() && (scope != ScopeNamespaced || of.Namespace != "")
}

// link creates the edge of an owner reference.
func (g *Graph) link(n *node, o Owner) edge {
	ref, valid := g.refOf(&n.Object, o)
	t := g.entries.lookup(ref)
	if t == nil {
		e := g.entries.get(ref.UID)
		t = &target{ref: ref, entry: e, dependents: map[*node]struct{}{}}
		if g.gone.has(ref) {
			t.state = absent
		}
		e.targets = append(e.targets, t)
		if t.observed() == nil {
			g.virtual++
		}
	}
	t.invalid = !valid // the scope of the kind may have changed
	t.dependents[n] = struct{}{}
	if o.Block == True {
		t.blocking++
	}
	g.edges++
	g.warn(n, t)
	g.ask(t)
	return edge{target: t, block: o.Block, controller: o.Controller}
}

// warn records a reference across namespaces.
func (g *Graph) warn(n *node, t *target) {
	across := t.invalid && !t.ref.malformed()
	if o := t.entry.node; o != nil && o.Kind == t.ref.Kind && o.Namespace != t.ref.Namespace && o.Namespace != "" {
		across = true
	}
	if across {
		g.pending.effects.Invalid = append(g.pending.effects.Invalid, Invalid{Dependent: n.object(), Owner: t.ref})
	}
}

// unlink removes edges, and reconsiders the owners that may have waited for that.
func (g *Graph) unlink(n *node, edges []edge) {
	for _, e := range edges {
		t := e.target
		// A reference may occur twice; then the node remains a dependent by the other edge.
		if !slices.ContainsFunc(n.edges, func(other edge) bool { return other.target == t }) {
			delete(t.dependents, n)
		}
		if e.block == True {
			t.blocking--
		}
		g.edges--
		if owner := t.observed(); owner != nil && owner.Deleting {
			g.consider(owner)
		}
		if len(t.dependents) == 0 {
			g.dismiss(t)
		}
	}
}

// dismiss drops a target without dependents.
func (g *Graph) dismiss(t *target) {
	i := slices.Index(t.entry.targets, t)
	if i < 0 {
		return // it was dismissed by the other of two edges
	}
	if t.observed() == nil {
		g.virtual--
	}
	t.entry.targets = slices.Delete(t.entry.targets, i, i+1)
	if t.state == absent {
		g.gone.add(t.ref)
	}
	g.entries.release(t.entry)
}

// object returns the object as it was observed.
func (n *node) object() Object {
	o := n.Object
	for _, e := range n.edges {
		o.Owners = append(o.Owners, e.owner())
	}
	return o
}

func (e edge) owner() Owner {
	r := e.target.ref
	return Owner{Kind: r.Kind, Version: r.Version, Name: r.Name, UID: r.UID, Block: e.block, Controller: e.controller}
}
