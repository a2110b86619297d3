package graph

import (
	"fmt"
	"slices"
	"strings"
)

// Vertex is an object of the graph, or an owner that was not observed: then only its kind, namespace, name and UID are known.
type Vertex struct {
	Object  Object
	Virtual bool
	State   State
	// Distance is the number of references between it and the selected object.
	Distance int
}

// Reference is an owner reference, from the UID of the dependent to the UID of the owner.
type Reference struct {
	Dependent, Owner string
	Status           RefStatus
	Block            bool
}

// Neighborhood is a part of the graph.
type Neighborhood struct {
	Vertices   []Vertex
	References []Reference
	// Truncated reports that objects within the requested depth are missing.
	Truncated bool
}

// Find returns the UID of the observed object with a kind, namespace and name. A doubtful one counts only if there is no other.
func (g *Graph) Find(kind Kind, namespace, name string) (uid string, ok bool) {
	for _, e := range g.entries {
		n := e.node
		if n == nil || n.Kind != kind || n.Namespace != namespace || n.Name != name {
			continue
		}
		if n.doubt == certain {
			return n.UID, true
		}
		uid, ok = n.UID, true
	}
	return uid, ok
}

// Neighbors returns the objects within a number of references of one, in both directions, at most limit, nearest first.
func (g *Graph) Neighbors(uid string, depth, limit int) (Neighborhood, bool) {
	e := g.entries[uid]
	if e == nil || e.node == nil {
		return Neighborhood{}, false
	}
	var out Neighborhood
	distance := map[*node]int{e.node: 0}
	order := []*node{e.node}
	for i := 0; i < len(order); i++ {
		n := order[i]
		if distance[n] == depth {
			continue
		}
		for _, next := range n.neighbors() {
			if _, ok := distance[next]; ok {
				continue
			}
			if len(order) >= limit {
				out.Truncated = true
				continue
			}
			distance[next] = distance[n] + 1
			order = append(order, next)
		}
	}
	virtual := map[string]bool{}
	for _, n := range order {
		out.Vertices = append(out.Vertices, Vertex{Object: n.object(), State: n.state(), Distance: distance[n]})
		for _, e := range n.edges {
			owner, uid := e.target.observed(), e.target.ref.UID
			if _, in := distance[owner]; owner != nil && !in || owner == nil && distance[n] == depth {
				continue
			}
			out.References = append(out.References, e.reference(n))
			if owner == nil && !virtual[uid] {
				virtual[uid] = true
				v := e.target.vertex()
				v.Distance = distance[n] + 1
				out.Vertices = append(out.Vertices, v)
			}
		}
	}
	return out, true
}

// neighbors returns the observed owners and dependents, each once, ordered by UID.
func (n *node) neighbors() []*node {
	out := n.dependents()
	for _, e := range n.edges {
		if owner := e.target.observed(); owner != nil {
			out = append(out, owner)
		}
	}
	slices.SortFunc(out, byUID)
	return slices.Compact(out)
}

// Dot returns the neighborhood in the Graphviz language. Arrows lead from owners to dependents, as deletions do.
func (n Neighborhood) Dot() string {
	var b strings.Builder
	b.WriteString("digraph owners {\n  node [shape=box];\n")
	for _, v := range n.Vertices {
		label := v.Object.Kind.String() + "\n" + v.Object.Name
		if v.Object.Namespace != "" {
			label = v.Object.Kind.String() + "\n" + v.Object.Namespace + "/" + v.Object.Name
		}
		style := "solid"
		switch {
		case v.Virtual:
			style = "dashed"
		case v.Object.Deleting || v.State == Doomed:
			style = "dotted"
		}
		if v.State != "" {
			label += "\n" + string(v.State)
		}
		fmt.Fprintf(&b, "  %q [label=%q, style=%s];\n", v.Object.UID, label, style)
	}
	for _, r := range n.References {
		width := 1
		if r.Block {
			width = 2
		}
		fmt.Fprintf(&b, "  %q -> %q [label=%q, penwidth=%d];\n", r.Owner, r.Dependent, r.Status, width)
	}
	b.WriteString("}\n")
	return b.String()
}
