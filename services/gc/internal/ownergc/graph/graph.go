// Package graph is the pure core of the owner-reference garbage collector (seed 004, and what Kubernetes documents of
// cascading deletion). It takes in what was observed (objects that came, changed and went; what the API server said when
// it was asked for an owner), and says what to do next with an object. It deletes nothing itself, keeps no time and knows
// no client. Nothing is ever decided on a guess: an owner counts as gone only when a watch saw its UID go, or the API
// server said that it is not where a reference points.
//
// Owner references are edges to targets. Several references to one UID that disagree about where it is (another namespace,
// kind or name) are several targets, each with a fate of its own; the observed object is at one of them at most.
//
//	dependent --edge--> target (UID and place) --- entry (UID) --- node, if an object with that UID was observed
//
//	a target that no observed node is at:
//	          Found            Missing, or a watch saw the UID go
//	unknown --------> present ----------> absent
//	   ^ |               |                           any of them becomes the observed node's once that is seen
//	   | +-> unresolvable (no such kind)
//	   +---- Kinds, Drop (what was known is not any more)
//
// A Graph is not safe for concurrent use; the caller has a lock. Every method is quick and does no I/O.
package graph

import "slices"

// Graph is the dependency graph. Make it with New.
type Graph struct {
	entries map[string]*entry // by UID
	scopes  map[Kind]Scope
	gone    memory
	nodes   int
	virtual int
	edges   int
	fx      Effects
	queued  map[Item]struct{}
}

// entry is all that is known of one UID.
type entry struct {
	uid     string
	node    *node // nil if no such object was observed
	targets []*target
}

// node is an observed object. Its owner references are edges; what they say stands in their targets.
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

// doubt is about an object that a list did not have any more although no watch had seen it go.
type doubt uint8

const (
	certain doubt = iota
	doubtful
	confirmed // the API server has it; the watch will, too
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
	// state, and awaiting that it is in foreground deletion, are what the API server said; an observed node says better.
	state    presence
	awaiting bool
	// invalid tells that the reference can point at nothing: see Effects.Invalid, and Ref.malformed.
	invalid    bool
	dependents map[*node]struct{}
	blocking   int // the number of edges that block the owner's deletion
}

// observed is the node that the target is, if it was observed.
func (t *target) observed() *node {
	if n := t.entry.node; n != nil && t.ref.names(&n.Object) {
		return n
	}
	return nil
}

// Effects are what an event leaves to be done.
type Effects struct {
	// Items are to be looked at: Decide says what to do with them. Each may have been queued before.
	Items []Item
	// Invalid are references whose owner is in a namespace where the dependent cannot have one: a Warning Event is due.
	Invalid []Invalid
}

// Invalid is an owner reference across namespaces, or of an object without a namespace to one with.
type Invalid struct {
	Dependent Object
	Owner     Ref
}

// Item is something to decide about: an object if UID is set, or else an owner that was not observed. It is comparable.
type Item struct {
	UID   string
	Owner Ref
	// Orphan puts it into the queue of orphaning.
	Orphan bool
}

// New returns an empty graph that remembers up to remember owners to be gone, beyond those that it has dependents of.
func New(remember int) *Graph {
	return &Graph{entries: map[string]*entry{}, scopes: map[Kind]Scope{}, gone: newMemory(remember), queued: map[Item]struct{}{}}
}

// Size is how much there is in the graph.
type Size struct{ Objects, Virtual, References int }

// Size tells the number of observed objects, of owners that were not observed, and of owner references.
func (g *Graph) Size() Size { return Size{Objects: g.nodes, Virtual: g.virtual, References: g.edges} }

// effects returns what has gathered since it was last called.
func (g *Graph) effects() Effects {
	fx := g.fx
	g.fx = Effects{}
	clear(g.queued)
	return fx
}

func (g *Graph) queue(i Item) {
	if _, ok := g.queued[i]; !ok {
		g.queued[i] = struct{}{}
		g.fx.Items = append(g.fx.Items, i)
	}
}

// consider queues a node if there is something to do with it.
func (g *Graph) consider(n *node) {
	if n.entry.node != n {
		return // it is gone
	}
	if a := g.decide(n); a.Verb != Keep {
		g.queue(Item{UID: n.UID, Orphan: a.orphaning})
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

// ask queues a target that nobody knows of.
func (g *Graph) ask(t *target) {
	if t.asks() {
		g.queue(Item{Owner: t.ref})
	}
}

// asks tells whether the API server has to be asked for the target.
func (t *target) asks() bool {
	return len(t.dependents) > 0 && !t.invalid && t.state == unknown && t.observed() == nil
}

func (g *Graph) entry(uid string) *entry {
	e := g.entries[uid]
	if e == nil {
		e = &entry{uid: uid}
		g.entries[uid] = e
	}
	return e
}

// release forgets an entry that nothing needs.
func (g *Graph) release(e *entry) {
	if e.node == nil && len(e.targets) == 0 {
		delete(g.entries, e.uid)
	}
}

func (g *Graph) lookup(r Ref) *target {
	if e := g.entries[r.UID]; e != nil {
		for _, t := range e.targets {
			if t.ref == r {
				return t
			}
		}
	}
	return nil
}

// place is where an owner reference of an object points, and whether it can point anywhere.
func (g *Graph) place(of *Object, o Owner) (r Ref, valid bool) {
	r = Ref{Kind: o.Kind, Version: o.Version, Namespace: of.Namespace, Name: o.Name, UID: o.UID}
	scope := g.scopes[o.Kind]
	if scope == ScopeCluster {
		r.Namespace = ""
	}
	return r, !r.malformed() && (scope != ScopeNamespaced || of.Namespace != "")
}

// link makes the edge of an owner reference.
func (g *Graph) link(n *node, o Owner) edge {
	ref, valid := g.place(&n.Object, o)
	t := g.lookup(ref)
	if t == nil {
		e := g.entry(ref.UID)
		t = &target{ref: ref, entry: e, dependents: map[*node]struct{}{}}
		if g.gone.has(ref) {
			t.state = absent
		}
		e.targets = append(e.targets, t)
		if t.observed() == nil {
			g.virtual++
		}
	}
	t.invalid = !valid // what is known of the kind may have changed
	t.dependents[n] = struct{}{}
	if o.Block == True {
		t.blocking++
	}
	g.edges++
	g.warn(n, t)
	g.ask(t)
	return edge{target: t, block: o.Block, controller: o.Controller}
}

// warn tells of a reference across namespaces.
func (g *Graph) warn(n *node, t *target) {
	across := t.invalid && !t.ref.malformed()
	if o := t.entry.node; o != nil && o.Kind == t.ref.Kind && o.Namespace != t.ref.Namespace && o.Namespace != "" {
		across = true
	}
	if across {
		g.fx.Invalid = append(g.fx.Invalid, Invalid{Dependent: n.object(), Owner: t.ref})
	}
}

// unlink takes edges away, and has those owners looked at that may have waited for it.
func (g *Graph) unlink(n *node, edges []edge) {
	for _, e := range edges {
		t := e.target
		// A reference may be there twice; the node still is a dependent by another edge.
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

// dismiss forgets a target that nothing points at.
func (g *Graph) dismiss(t *target) {
	i := slices.Index(t.entry.targets, t)
	if i < 0 {
		return // it was pointed at twice
	}
	if t.observed() == nil {
		g.virtual--
	}
	t.entry.targets = slices.Delete(t.entry.targets, i, i+1)
	if t.state == absent {
		g.gone.add(t.ref)
	}
	g.release(t.entry)
}

// object is the observed object as it was observed.
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
