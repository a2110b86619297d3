package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

func newGraph(remember int) *graph.Graph {
	g := graph.New(remember)
	g.Kinds(scopes())
	return g
}

// object returns an apple in namespace one.
func object(uid string, owners ...graph.Owner) graph.Object {
	return graph.Object{Kind: apple, Namespace: "one", Name: uid, UID: uid, ResourceVersion: "7", Owners: owners}
}

func ownedBy(uid string) graph.Owner {
	return graph.Owner{Kind: apple, Version: "v1", Name: uid, UID: uid}
}

func blocking(uid string) graph.Owner {
	o := ownedBy(uid)
	o.Block = graph.True
	return o
}

func deleted(o graph.Object, finalizers ...string) graph.Object {
	o.Deleting, o.Finalizers = true, finalizers
	return o
}

func ref(uid string) graph.Ref {
	return graph.Ref{Kind: apple, Version: "v1", Namespace: "one", Name: uid, UID: uid}
}

func verb(g *graph.Graph, uid string) graph.Verb {
	return g.Decide(graph.Item{UID: uid}, nil).Verb
}

// asked returns the owners that an event queues for a lookup; due the objects that it queues.
func asked(fx graph.Effects) (out []string) {
	for _, i := range fx.Items {
		if i.UID == "" {
			out = append(out, i.Owner.UID)
		}
	}
	return out
}

func due(fx graph.Effects) (out []string) {
	for _, i := range fx.Items {
		if i.UID != "" {
			out = append(out, i.UID)
		}
	}
	return out
}

func TestDependentIsDeletedAfterItsOwner(t *testing.T) {
	g := newGraph(10)
	require.Empty(t, g.Observe(object("owner")))
	require.Empty(t, g.Observe(object("d", ownedBy("owner"))))
	require.Empty(t, g.Observe(object("d", ownedBy("owner"))), "observed twice")
	require.Equal(t, graph.Keep, verb(g, "d"))
	fx := g.Remove(object("owner"))
	require.Equal(t, []graph.Item{{UID: "d"}}, fx.Items)
	require.Equal(t, graph.Action{Verb: graph.Delete, Cause: graph.OwnersGone, Policy: graph.Background, Object: object("d", ownedBy("owner"))},
		g.Decide(graph.Item{UID: "d"}, nil))
	g.Remove(object("d"))
	require.Equal(t, graph.Size{}, g.Size())
	require.Equal(t, graph.Keep, verb(g, "d"))
}

func TestFinalizerSelectsThePolicy(t *testing.T) {
	for finalizer, want := range map[string]graph.Policy{graph.FinalizerOrphan: graph.Orphan, graph.FinalizerForeground: graph.Foreground, custom: graph.Background} {
		g := newGraph(10)
		o := object("d", ownedBy("owner"))
		o.Finalizers = []string{finalizer}
		g.Observe(o)
		g.Missing(ref("owner"))
		require.Equal(t, want, g.Decide(graph.Item{UID: "d"}, nil).Policy)
		// A waiting owner asks for a foreground deletion of what has dependents, but the finalizer wins.
		g = newGraph(10)
		g.Observe(deleted(object("owner"), graph.FinalizerForeground))
		o.Owners = []graph.Owner{blocking("owner")}
		g.Observe(o)
		g.Observe(object("below", ownedBy("d")))
		if want == graph.Background {
			want = graph.Foreground
		}
		require.Equal(t, want, g.Decide(graph.Item{UID: "d"}, nil).Policy)
	}
}

func TestForegroundDeletionStartsAtTheLeaves(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("root"))
	g.Observe(object("middle", blocking("root")))
	g.Observe(object("leaf", blocking("middle")))
	require.Equal(t, []string{"middle"}, due(g.Observe(deleted(object("root"), graph.FinalizerForeground))))
	a := g.Decide(graph.Item{UID: "middle"}, nil)
	require.Equal(t, graph.Foreground, a.Policy)
	require.Equal(t, graph.OwnersWait, a.Cause)
	require.Equal(t, []string{"leaf"}, due(g.Observe(deleted(object("middle", blocking("root")), graph.FinalizerForeground))))
	require.Equal(t, graph.Background, g.Decide(graph.Item{UID: "leaf"}, nil).Policy)
	require.Equal(t, []string{"middle"}, due(g.Remove(object("leaf"))))
	a = g.Decide(graph.Item{UID: "middle"}, nil)
	require.Equal(t, graph.Finalize, a.Verb)
	require.Equal(t, graph.FinalizerForeground, a.Finalizer)
	require.Equal(t, []string{"root"}, due(g.Remove(object("middle"))))
	require.Equal(t, graph.DependentsGone, g.Decide(graph.Item{UID: "root"}, nil).Cause)
}

func TestForegroundDeletionIgnoresNonBlockingDependents(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("d", blocking("root")))
	fx := g.Observe(deleted(object("root"), graph.FinalizerForeground))
	require.Equal(t, []string{"d"}, due(fx))
	d := object("d", ownedBy("root"))
	d.Owners[0].Block = graph.False
	require.ElementsMatch(t, []string{"root", "d"}, due(g.Observe(d)))
	require.Equal(t, graph.Finalize, verb(g, "root"))
}

func TestWaitCycleIsBroken(t *testing.T) {
	g := newGraph(10)
	g.Observe(deleted(object("a", blocking("c")), graph.FinalizerForeground))
	g.Observe(deleted(object("b", blocking("a"), ownedBy("x")), graph.FinalizerForeground))
	g.Observe(object("c", blocking("b")))
	require.Equal(t, graph.Keep, verb(g, "a"), "c is not being deleted: there is no cycle yet")
	require.ElementsMatch(t, []string{"a", "c"}, due(g.Observe(deleted(object("c", blocking("b")), graph.FinalizerForeground))))
	a := g.Decide(graph.Item{UID: "c"}, nil)
	require.Equal(t, graph.WaitCycle, a.Cause)
	require.Equal(t, graph.False, a.Owners[0].Block)
}

func TestDependentsAreOrphanedBeforeTheirOwnerIsFinalized(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("stays"))
	g.Observe(object("d", ownedBy("owner"), ownedBy("stays")))
	fx := g.Observe(deleted(object("owner"), graph.FinalizerOrphan))
	require.Equal(t, []graph.Item{{UID: "d", Orphan: true}}, fx.Items)
	a := g.Decide(fx.Items[0], nil)
	require.Equal(t, graph.Patch, a.Verb)
	require.Equal(t, []graph.Owner{ownedBy("stays")}, a.Owners)
	require.Equal(t, graph.Keep, verb(g, "owner"))
	require.Equal(t, []graph.Item{{UID: "owner", Orphan: true}}, g.Observe(object("d", ownedBy("stays"))).Items)
	a = g.Decide(graph.Item{UID: "owner", Orphan: true}, nil)
	require.Equal(t, graph.FinalizerOrphan, a.Finalizer)
}

func TestUnobservedOwnerIsLookedUpOnce(t *testing.T) {
	g := newGraph(10)
	require.Equal(t, []string{"owner"}, asked(g.Observe(object("a", ownedBy("owner")))))
	require.Empty(t, due(g.Observe(object("b", ownedBy("owner")))))
	require.Equal(t, graph.Size{Objects: 2, Virtual: 1, References: 2}, g.Size())
	lookup := graph.Item{Owner: ref("owner")}
	require.Equal(t, ref("owner"), g.Decide(lookup, nil).Ref)
	t.Run("found", func(t *testing.T) {
		require.Empty(t, g.Found(ref("owner"), object("owner")).Items)
		require.Equal(t, graph.Lookup, g.Decide(lookup, nil).Verb, "it is not observed yet: look again later")
		require.Equal(t, graph.Keep, verb(g, "a"))
	})
	t.Run("found, in foreground deletion", func(t *testing.T) {
		require.ElementsMatch(t, []string{"a", "b"}, due(g.Found(ref("owner"), deleted(object("owner"), graph.FinalizerForeground))))
	})
	t.Run("missing", func(t *testing.T) {
		require.ElementsMatch(t, []string{"a", "b"}, due(g.Missing(ref("owner"))))
		require.Equal(t, graph.Keep, g.Decide(lookup, nil).Verb)
	})
	t.Run("observed later", func(t *testing.T) {
		require.Empty(t, g.Observe(object("owner")).Items)
		require.Equal(t, graph.Keep, verb(g, "a"))
	})
}

func TestDeletedOwnersAreRemembered(t *testing.T) {
	g := newGraph(1)
	g.Remove(object("owner"))
	fx := g.Observe(object("late", ownedBy("owner")))
	require.Empty(t, asked(fx))
	require.Equal(t, []string{"late"}, due(fx))
	g.Remove(object("late"))
	require.Empty(t, asked(g.Observe(object("later", ownedBy("owner")))), "the last lookup is remembered")
	g.Remove(object("later"))
	g.Remove(object("another")) // displaces the owner
	require.Equal(t, []string{"owner"}, asked(g.Observe(object("later", ownedBy("owner")))))
	none := newGraph(0)
	none.Remove(object("owner"))
	require.Equal(t, []string{"owner"}, asked(none.Observe(object("late", ownedBy("owner")))))
}

func TestOwnerInAnotherNamespaceIsNoOwner(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("owner"))
	d := object("d", ownedBy("owner"))
	d.Namespace = "two"
	fx := g.Observe(d)
	require.Equal(t, []string{"owner"}, asked(fx), "the API server is asked regardless")
	require.Len(t, fx.Invalid, 1)
	require.Equal(t, "d", fx.Invalid[0].Dependent.UID)
	require.Equal(t, "two", fx.Invalid[0].Owner.Namespace)
	require.Equal(t, []string{"d"}, due(g.Missing(fx.Invalid[0].Owner)))
	t.Run("the owner is observed later", func(t *testing.T) {
		g := newGraph(10)
		require.Empty(t, g.Observe(d).Invalid)
		require.Len(t, g.Observe(object("owner")).Invalid, 1)
	})
	t.Run("its deletion in its own namespace means nothing", func(t *testing.T) {
		g := newGraph(10)
		g.Observe(d)
		g.Observe(object("owner"))
		require.Empty(t, due(g.Remove(object("owner"))))
		require.Equal(t, graph.Keep, verb(g, "d"))
	})
	t.Run("it neither blocks nor frees an object", func(t *testing.T) {
		g := newGraph(10)
		d := d
		d.Owners = []graph.Owner{blocking("owner")}
		g.Observe(d)
		require.Equal(t, []string{"owner"}, due(g.Observe(deleted(object("owner"), graph.FinalizerForeground))))
		require.Equal(t, graph.Finalize, verb(g, "owner"))
	})
}

func TestClusterScopedObjectHasNoNamespacedOwner(t *testing.T) {
	d := graph.Object{Kind: garden, Name: "d", UID: "d", Owners: []graph.Owner{ownedBy("owner")}}
	g := newGraph(10)
	fx := g.Observe(d)
	require.Len(t, fx.Invalid, 1)
	require.Empty(t, fx.Items)
	g.Remove(object("owner"))
	require.Equal(t, graph.Keep, verb(g, "d"))
	t.Run("the scope is learned later", func(t *testing.T) {
		g := graph.New(10)
		require.Equal(t, []string{"owner"}, asked(g.Observe(d)))
		require.Len(t, g.Kinds(scopes()).Invalid, 1)
		require.Equal(t, graph.Keep, g.Decide(graph.Item{Owner: graph.Ref{Kind: apple, Version: "v1", Name: "owner", UID: "owner"}}, nil).Verb)
	})
}

func TestUnknownKind(t *testing.T) {
	g := graph.New(10)
	owner := graph.Owner{Kind: garden, Version: "v1", Name: "g", UID: "g"}
	fx := g.Observe(object("d", owner))
	require.Len(t, asked(fx), 1)
	require.Empty(t, g.Unresolved(fx.Items[0].Owner).Items)
	require.Equal(t, graph.Keep, verb(g, "d"))
	require.Equal(t, graph.Keep, g.Decide(fx.Items[0], nil).Verb)
	fx = g.Kinds(scopes())
	require.Contains(t, fx.Items, graph.Item{Owner: graph.Ref{Kind: garden, Version: "v1", Name: "g", UID: "g"}}, "it is cluster-scoped, as is known now")
	require.Empty(t, g.Observe(graph.Object{Kind: garden, Name: "g", UID: "g"}).Items)
	require.Zero(t, g.Size().Virtual)
	require.Equal(t, []string{"d"}, due(g.Remove(graph.Object{Kind: garden, Name: "g", UID: "g"})))
}

func TestKindThatIsNoLongerServed(t *testing.T) {
	g := newGraph(10)
	pearTree := graph.Object{Kind: pear, Namespace: "one", Name: "p", UID: "p", Owners: []graph.Owner{blocking("root")}}
	g.Observe(deleted(object("root"), graph.FinalizerForeground))
	g.Observe(pearTree)
	g.Observe(object("d", graph.Owner{Kind: pear, Version: "v1", Name: "p", UID: "p"}))
	fx := g.Drop(pear)
	require.Equal(t, []string{"root"}, due(fx), "nothing blocks it")
	require.Equal(t, []string{"p"}, asked(fx))
	require.Equal(t, graph.Keep, verb(g, "d"), "no evidence that its owner is deleted")
	require.Equal(t, graph.Size{Objects: 2, Virtual: 1, References: 1}, g.Size())
}

func TestMissingInAListIsNoEvidence(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("owner"))
	g.Observe(object("gone"))
	rest := []graph.Object{object("gone"), object("d", ownedBy("owner")), object("e", ownedBy("owner"), ownedBy("gone"))}
	for _, o := range rest {
		g.Observe(o)
	}
	require.Equal(t, []string{"owner"}, due(g.List(apple, rest)))
	require.Equal(t, graph.Verify, verb(g, "owner"))
	require.Equal(t, graph.Keep, verb(g, "d"))
	require.Empty(t, due(g.Remove(object("gone"))), "its other owner is doubtful")
	require.Equal(t, []string{"e"}, due(g.Confirm("owner")))
	require.Equal(t, graph.DanglingOwners, g.Decide(graph.Item{UID: "e"}, nil).Cause)
	require.Equal(t, graph.Verify, verb(g, "owner"), "the watch has not shown it yet")
	require.Contains(t, due(g.List(apple, rest[1:])), "owner")
	require.Equal(t, graph.Keep, verb(g, "e"))
	require.Equal(t, []string{"e"}, due(g.Observe(object("owner"))))
	require.Equal(t, graph.Keep, verb(g, "owner"))
	require.Empty(t, due(g.List(pear, nil)), "a list of another kind")
}

// TestListIsAtomic: an orphaning owner is not finalized because its dependents come later in the list.
func TestListIsAtomic(t *testing.T) {
	g := newGraph(10)
	fx := g.List(apple, []graph.Object{deleted(object("owner"), graph.FinalizerOrphan), object("d", ownedBy("owner"))})
	require.Contains(t, fx.Items, graph.Item{UID: "d", Orphan: true})
	require.Equal(t, graph.Keep, verb(g, "owner"))
}

func TestObjectServedByTwoGroups(t *testing.T) {
	g := newGraph(10)
	other := object("x")
	other.Kind = pear
	g.Observe(object("x"))
	g.Observe(object("d", ownedBy("x")))
	g.Observe(other)
	require.Empty(t, g.Remove(other))
	require.Equal(t, 2, g.Size().Objects)
	require.Equal(t, graph.Keep, verb(g, "d"))
}

// TestConflictIsDecidedByTheLiveObject: a write that conflicts is decided again for the object as it is.
func TestConflictIsDecidedByTheLiveObject(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("d", ownedBy("owner")))
	g.Observe(object("other"))
	g.Missing(ref("owner"))
	item := graph.Item{UID: "d"}
	decide := func(live graph.Object) graph.Action { return g.Decide(item, &live) }
	require.Equal(t, graph.Delete, g.Decide(item, nil).Verb)
	live := object("d", ownedBy("owner"))
	live.ResourceVersion = "8"
	require.Equal(t, "8", decide(live).Object.ResourceVersion)
	require.Equal(t, graph.Keep, decide(object("d")).Verb, "it has no owner now")
	require.Equal(t, graph.DanglingOwners, decide(object("d", ownedBy("owner"), ownedBy("other"))).Cause)
	require.Equal(t, graph.Keep, decide(object("d", ownedBy("unheard-of"))).Verb)
	require.Equal(t, graph.Keep, decide(deleted(object("d", ownedBy("owner")), custom)).Verb)
	require.Equal(t, graph.Size{Objects: 2, Virtual: 1, References: 1}, g.Size(), "Decide changes nothing")
}

func TestPendingReturnsAllWork(t *testing.T) {
	g := newGraph(10)
	g.Observe(object("root"))
	g.Observe(object("kept", ownedBy("root")))
	g.Observe(object("asks", ownedBy("absent")))
	g.Observe(object("d", ownedBy("gone")))
	g.Missing(ref("gone"))
	g.Observe(graph.Object{Kind: garden, Name: "x", UID: "x", Owners: []graph.Owner{ownedBy("root")}})
	fx := g.Pending()
	require.Len(t, fx.Invalid, 1)
	require.Equal(t, []string{"absent"}, asked(fx))
	require.Equal(t, []string{"d"}, due(fx))
	require.Equal(t, 1, g.Doomed(func(k graph.Kind) bool { return k == apple }))
	require.Zero(t, g.Doomed(func(k graph.Kind) bool { return k == pear }))
}
