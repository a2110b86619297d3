package graph_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

func explain(t *testing.T, g *graph.Graph, uid string) graph.Explanation {
	t.Helper()
	x, ok := g.Explain(uid, 2)
	require.True(t, ok)
	return x
}

func uids(objects []graph.Object) []string {
	var out []string
	for _, o := range objects {
		out = append(out, o.UID)
	}
	return out
}

func TestExplain(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("root"))
	g.Observe(object("middle", ownedBy("root")))
	g.Observe(object("leaf", ownedBy("absent"), ownedBy("middle")))
	x := explain(t, g, "leaf")
	require.Equal(t, graph.Owned, x.State)
	require.Equal(t, []string{"middle", "root"}, uids(x.Path))
	require.Equal(t, []graph.OwnerView{{Owner: ownedBy("absent"), Namespace: "one", Status: graph.Unverified}, {Owner: ownedBy("middle"), Namespace: "one", Status: graph.Solid}}, x.Owners)
	require.Equal(t, graph.Free, explain(t, g, "root").State)

	g.Unresolved(ref("absent"))
	require.Equal(t, graph.Unresolvable, explain(t, g, "leaf").Owners[0].Status)
	g.Remove(object("middle"))
	require.Equal(t, graph.Unclear, explain(t, g, "leaf").State)
	g.Remove(object("absent"))
	x = explain(t, g, "leaf")
	require.Equal(t, graph.Doomed, x.State)
	require.Equal(t, graph.Delete, x.Next.Verb)
	require.Equal(t, graph.Dangling, x.Owners[0].Status)
	_, ok := g.Explain("absent", 2)
	require.False(t, ok)
}

func TestExplainDeletion(t *testing.T) {
	g := newGraph(10)
	g.Observe(deleted(object("root"), graph.FinalizerForeground, custom))
	for _, uid := range []string{"c", "a", "b"} {
		g.Observe(object(uid, blocking("root")))
	}
	g.Observe(object("lax", ownedBy("root")))
	x := explain(t, g, "root")
	require.Equal(t, graph.AwaitsDependents, x.State)
	require.Equal(t, []string{"a", "b"}, uids(x.Blockers))
	require.Equal(t, 3, x.BlockerCount)
	require.Equal(t, []string{custom}, x.Finalizers)
	require.Equal(t, graph.Waiting, explain(t, g, "a").Owners[0].Status)
	g.Observe(deleted(object("root"), graph.FinalizerOrphan))
	x = explain(t, g, "root")
	require.Equal(t, graph.AwaitsOrphaning, x.State)
	require.Equal(t, 4, x.BlockerCount)
	require.Equal(t, graph.Orphaning, explain(t, g, "a").Owners[0].Status)
	require.Equal(t, graph.Owned, explain(t, g, "a").State)
	g.Observe(deleted(object("root"), custom))
	x = explain(t, g, "root")
	require.Equal(t, graph.AwaitsFinalizers, x.State)
	require.Zero(t, x.BlockerCount)
	g.Observe(deleted(object("root")))
	require.Equal(t, graph.Terminating, explain(t, g, "root").State)
	g.Observe(graph.Object{Kind: garden, Name: "x", UID: "x", Owners: []graph.Owner{ownedBy("root")}})
	x = explain(t, g, "x")
	require.Equal(t, graph.Unclear, x.State)
	require.Equal(t, graph.NoReference, x.Owners[0].Status)
}

func TestExplainCycle(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("a", ownedBy("b")))
	g.Observe(object("b", ownedBy("a")))
	require.Equal(t, []string{"b"}, uids(explain(t, g, "a").Path))
}

func TestPreview(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("root"))
	g.Observe(object("other"))
	g.Observe(object("b", ownedBy("root")))
	g.Observe(object("a", ownedBy("root")))
	g.Observe(object("diamond", ownedBy("a"), ownedBy("b")))
	g.Observe(object("shared", ownedBy("root"), ownedBy("other")))
	g.Observe(object("held", ownedBy("diamond"), graph.Owner{Kind: ghost, Version: "v1", Name: "x", UID: "x"}))
	keeps := object("keeps", ownedBy("root"))
	keeps.Finalizers = []string{graph.FinalizerOrphan}
	g.Observe(keeps)
	g.Observe(object("kept", ownedBy("keeps")))
	preview := func(policy graph.Policy) (out []string) {
		found, ok := g.Preview("root", policy)
		require.True(t, ok)
		for _, c := range found {
			out = append(out, c.Object.UID+" "+string(c.Outcome)+" "+c.Via)
		}
		return out
	}
	want := []string{"root Goes ", "a Goes root", "b Goes root", "keeps Goes root", "shared Stays root", "diamond Goes a", "kept Stays keeps", "held Held diamond"}
	require.Equal(t, want, preview(graph.Background))
	require.Equal(t, want, preview(graph.Foreground))
	require.Equal(t, []string{"root Goes ", "a Stays root", "b Stays root", "keeps Stays root", "shared Stays root"}, preview(graph.Orphan))
	_, ok := g.Preview("absent", graph.Background)
	require.False(t, ok)
}

// TestPreviewMatchesDeletion compares a preview with what the deletion then does.
func TestPreviewMatchesDeletion(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newModel(t)
		for range rapid.IntRange(1, 12).Draw(t, "objects") {
			w.drawCreate(true)
		}
		for range rapid.IntRange(0, 4).Draw(t, "further references") {
			uid, _ := w.drawUID()
			r, _ := w.drawOwner(false)
			w.objects[uid].Owners = append(w.objects[uid].Owners, r)
			w.wrote(w.objects[uid], false)
		}
		w.settle()
		root, ok := w.drawUID()
		if !ok || w.objects[root].Kind == hidden {
			return
		}
		policy := rapid.SampledFrom([]graph.Policy{graph.Background, graph.Orphan}).Draw(t, "policy")
		foreseen, ok := w.g.Preview(root, policy)
		require.True(t, ok)
		want := map[string]bool{}
		for _, uid := range w.all() {
			want[uid] = true
		}
		for _, c := range foreseen {
			if c.Outcome == graph.Goes {
				delete(want, c.Object.UID)
			}
		}
		w.delete(root, policy)
		w.settle()
		require.Equal(t, slices.Sorted(maps.Keys(want)), w.all())
	})
}

func TestNeighbors(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("root"))
	g.Observe(object("middle", blocking("root"), ownedBy("absent")))
	g.Observe(object("leaf", ownedBy("middle")))
	g.Observe(object("sibling", ownedBy("root")))
	near, ok := g.Neighbors("middle", 1, 10)
	require.True(t, ok)
	require.False(t, near.Truncated)
	var names []string
	for _, v := range near.Vertices {
		names = append(names, v.Object.UID)
		require.Equal(t, v.Object.UID == "absent", v.Virtual)
	}
	require.Equal(t, []string{"middle", "absent", "leaf", "root"}, names)
	require.Equal(t, []graph.Reference{
		{Dependent: "middle", Owner: "root", Status: graph.Solid, Block: true},
		{Dependent: "middle", Owner: "absent", Status: graph.Unverified},
		{Dependent: "leaf", Owner: "middle", Status: graph.Solid}}, near.References)
	all, _ := g.Neighbors("middle", 2, 10)
	require.Len(t, all.Vertices, 5)
	few, _ := g.Neighbors("middle", 2, 2)
	require.True(t, few.Truncated)
	_, ok = g.Neighbors("absent", 1, 10)
	require.False(t, ok)
	require.Equal(t, `digraph owners {
  node [shape=box];
  "leaf" [label="Apple.fruit\none/leaf\nOwned", style=solid];
  "middle" [label="Apple.fruit\none/middle\nOwned", style=solid];
  "middle" -> "leaf" [label="Solid", penwidth=1];
}
`, func() string { n, _ := g.Neighbors("leaf", 1, 10); return n.Dot() }())
}

func TestFind(t *testing.T) {
	g := newGraph(10)
	old, young := object("old"), object("young")
	old.Name, young.Name = "n", "n"
	g.Observe(old)
	g.List(apple, nil)
	uid, ok := g.Find(apple, "one", "n")
	require.True(t, ok)
	require.Equal(t, "old", uid)
	g.Observe(young)
	uid, _ = g.Find(apple, "one", "n")
	require.Equal(t, "young", uid)
	for _, elsewhere := range []func() (string, bool){
		func() (string, bool) { return g.Find(pear, "one", "n") },
		func() (string, bool) { return g.Find(apple, "two", "n") },
		func() (string, bool) { return g.Find(apple, "one", "m") },
	} {
		_, ok := elsewhere()
		require.False(t, ok)
	}
}
