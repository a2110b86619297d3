package graph

import "slices"

// Part is a part of the whole graph: objects, owners that were not observed, and the owner references of all of them.
type Part struct {
	Vertices   []Vertex
	References []Reference
}

// UIDs returns the UIDs of all objects and of all owners that were not observed, sorted. With a namespace, it returns only the
// objects in it and the owners that they refer to.
func (g *Graph) UIDs(namespace string) []string {
	out := make([]string, 0, len(g.entries))
	for uid, e := range g.entries {
		if namespace == "" || e.within(namespace) {
			out = append(out, uid)
		}
	}
	slices.Sort(out)
	return out
}

// within reports whether the object, or one of its dependents, is in a namespace.
func (e *entry) within(namespace string) bool {
	if e.node != nil && e.node.Namespace == namespace {
		return true
	}
	for _, t := range e.targets {
		for d := range t.dependents {
			if d.Namespace == namespace {
				return true
			}
		}
	}
	return false
}

// Part returns the vertices with the given UIDs, in that order, and their owner references. UIDs that are no longer in the graph
// are skipped: a caller may read the graph in parts and let it change between them.
func (g *Graph) Part(uids []string) Part {
	var out Part
	for _, uid := range uids {
		e := g.entries[uid]
		if e == nil {
			continue
		}
		n := e.node
		if n == nil {
			out.Vertices = append(out.Vertices, e.targets[0].vertex())
			continue
		}
		out.Vertices = append(out.Vertices, Vertex{Object: n.object(), State: n.state()})
		for _, edge := range n.edges {
			out.References = append(out.References, edge.reference(n))
		}
	}
	return out
}

// vertex returns the vertex of an owner that was not observed.
func (t *target) vertex() Vertex {
	return Vertex{Virtual: true, Object: Object{Kind: t.ref.Kind, Namespace: t.ref.Namespace, Name: t.ref.Name, UID: t.ref.UID}}
}

// reference returns the owner reference of a dependent.
func (e edge) reference(of *node) Reference {
	return Reference{Dependent: of.UID, Owner: e.target.ref.UID, Status: e.status(), Block: e.block == True}
}
