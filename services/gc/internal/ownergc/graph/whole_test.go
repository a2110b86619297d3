package graph_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

func in(namespace string, o graph.Object) graph.Object {
	o.Namespace = namespace
	return o
}

// twoNamespaces has objects in the namespaces one and two that share a cluster-scoped owner, and an owner that was not observed.
func twoNamespaces() *graph.Graph {
	g := newGraph(10)
	inGarden := graph.Owner{Kind: garden, Version: "v1", Name: "g", UID: "g"}
	g.Observe(graph.Object{Kind: garden, Name: "g", UID: "g"})
	g.Observe(object("a", inGarden, ownedBy("absent")))
	g.Observe(in("two", object("b", inGarden)))
	g.Observe(object("free"))
	return g
}

func TestUIDs(t *testing.T) {
	g := twoNamespaces()
	for namespace, want := range map[string][]string{
		"":      {"a", "absent", "b", "free", "g"},
		"one":   {"a", "absent", "free", "g"},
		"two":   {"b", "g"},
		"three": {},
	} {
		require.Equal(t, want, g.UIDs(namespace), namespace)
	}
	require.Empty(t, newGraph(10).UIDs(""))
}

func TestPart(t *testing.T) {
	g := twoNamespaces()
	part := g.Part([]string{"g", "deleted meanwhile", "absent", "a"})
	var uids []string
	for _, v := range part.Vertices {
		uids = append(uids, v.Object.UID)
		require.Zero(t, v.Distance)
		require.Equal(t, v.Object.UID == "absent", v.Virtual)
	}
	require.Equal(t, []string{"g", "absent", "a"}, uids, "in the order of the request")
	require.Equal(t, graph.Free, part.Vertices[0].State)
	require.Equal(t, graph.Object{Kind: apple, Namespace: "one", Name: "absent", UID: "absent"}, part.Vertices[1].Object)
	require.Equal(t, []graph.Reference{
		{Dependent: "a", Owner: "g", Status: graph.Solid}, {Dependent: "a", Owner: "absent", Status: graph.Unverified}}, part.References)
	require.Equal(t, graph.Part{}, g.Part(nil))
}

// TestPartsAreTheWholeGraph: whatever the size of the parts, every object and every reference is in exactly one of them.
func TestPartsAreTheWholeGraph(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := newModel(t)
		for range rapid.IntRange(0, 15).Draw(t, "objects") {
			m.drawCreate(true)
		}
		m.settle()
		vertices, references := map[string]bool{}, 0
		for chunk := range slices.Chunk(m.g.UIDs(""), rapid.IntRange(1, 5).Draw(t, "size")) {
			part := m.g.Part(chunk)
			require.Len(t, part.Vertices, len(chunk))
			references += len(part.References)
			for _, v := range part.Vertices {
				require.False(t, vertices[v.Object.UID], "%s is in two parts", v.Object.UID)
				vertices[v.Object.UID] = true
			}
			for _, r := range part.References {
				require.Contains(t, chunk, r.Dependent, "a reference is sent with its dependent")
			}
		}
		require.Equal(t, m.g.Size().References, references)
		require.GreaterOrEqual(t, len(vertices), m.g.Size().Objects)
		require.ElementsMatch(t, m.g.UIDs(""), slices.Collect(maps.Keys(vertices)))
	})
}
