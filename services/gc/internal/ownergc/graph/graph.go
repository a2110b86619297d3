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

// Graph is the dependency graph. Create it with New.
type Graph struct {
	links
	nodes int
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
	return &Graph{links: links{entries: entries{}, scopes: map[Kind]Scope{}, gone: newMemory(remember), pending: pending{queued: map[Item]struct{}{}}}}
}

// Size is the size of the graph.
type Size struct{ Objects, Virtual, References int }

// Size returns the number of observed objects, of owners that were not observed, and of owner references.
func (g *Graph) Size() Size { return Size{Objects: g.nodes, Virtual: g.virtual, References: g.edges} }

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
