package graph_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// ownerCase is a way in which an owner can stand to its dependent.
type ownerCase string

const (
	solidOwner     ownerCase = "solid"     // it exists
	danglingOwner  ownerCase = "dangling"  // it was deleted
	waitingOwner   ownerCase = "waiting"   // it is being deleted in the foreground
	orphaningOwner ownerCase = "orphaning" // it is being deleted with the policy Orphan
	openOwner      ownerCase = "open"      // it was not observed, and the API server was not asked
	unknownOwner   ownerCase = "unknown"   // the API server does not serve its kind
	invalidOwner   ownerCase = "invalid"   // no object can be the owner
)

func ownerCases() []ownerCase {
	return []ownerCase{solidOwner, danglingOwner, waitingOwner, orphaningOwner, openOwner, unknownOwner, invalidOwner}
}

// addOwner puts an owner of a case into the graph, and returns the reference to it.
func addOwner(g *graph.Graph, uid string, c ownerCase) graph.Owner {
	owner := ownedBy(uid)
	switch c {
	case solidOwner:
		g.Observe(object(uid))
	case danglingOwner:
		g.Observe(object(uid))
		g.Remove(object(uid))
	case waitingOwner:
		g.Observe(deleted(object(uid), graph.FinalizerForeground))
	case orphaningOwner:
		g.Observe(deleted(object(uid), graph.FinalizerOrphan))
	case unknownOwner:
		owner.Kind = ghost
	case invalidOwner:
		owner.Name = ""
	case openOwner:
	}
	return owner
}

// expected states the rules of cascading deletion once more, in their own words.
func expected(cases []ownerCase, hasDependents bool) (verb graph.Verb, policy graph.Policy, left []int) {
	has := func(some ...ownerCase) bool {
		return slices.ContainsFunc(cases, func(c ownerCase) bool { return slices.Contains(some, c) })
	}
	remaining := func(removed ...ownerCase) (out []int) {
		for i, c := range cases {
			if !slices.Contains(removed, c) {
				out = append(out, i)
			}
		}
		return out
	}
	switch {
	case len(cases) == 0:
		return graph.Keep, "", nil
	case has(orphaningOwner): // it must not be deleted on behalf of that owner, so every useless reference is removed at once
		return graph.Patch, "", remaining(orphaningOwner, danglingOwner, waitingOwner)
	case has(openOwner, unknownOwner, invalidOwner): // never act on missing knowledge
		return graph.Keep, "", nil
	case has(solidOwner) && has(danglingOwner, waitingOwner):
		return graph.Patch, "", remaining(danglingOwner, waitingOwner)
	case has(solidOwner):
		return graph.Keep, "", nil
	case has(waitingOwner) && hasDependents: // the owner waits for the whole subtree
		return graph.Delete, graph.Foreground, nil
	}
	return graph.Delete, graph.Background, nil
}

// TestDecideEveryCombinationOfOwners tries every list of up to three owners, with and without dependents of the object.
func TestDecideEveryCombinationOfOwners(t *testing.T) {
	var lists [][]ownerCase
	lists = append(lists, nil)
	for first := 0; first < len(lists); first++ {
		if len(lists[first]) == 3 {
			continue
		}
		for _, c := range ownerCases() {
			lists = append(lists, append(slices.Clone(lists[first]), c))
		}
	}
	require.Len(t, lists, 1+7+49+343)
	for _, cases := range lists {
		for _, hasDependents := range []bool{false, true} {
			name := fmt.Sprintf("%v, dependents: %t", cases, hasDependents)
			g := newGraph(10)
			var owners []graph.Owner
			for i, c := range cases {
				owners = append(owners, addOwner(g, fmt.Sprint("owner-", i), c))
			}
			if hasDependents {
				g.Observe(object("dependent", ownedBy("d")))
			}
			fx := g.Observe(object("d", owners...))
			for _, i := range fx.Items {
				if i.Owner.Kind == ghost {
					g.Unresolved(i.Owner)
				}
			}
			verb, policy, left := expected(cases, hasDependents)
			a := g.Decide(graph.Item{UID: "d"}, nil)
			require.Equal(t, verb, a.Verb, name)
			require.Equal(t, policy, a.Policy, name)
			require.Equal(t, verb != graph.Keep, slices.Contains(due(g.Pending()), "d"), "what is to be done is queued: %s", name)
			if verb == graph.Patch {
				want := []graph.Owner{}
				for _, i := range left {
					want = append(want, owners[i])
				}
				require.Equal(t, want, a.Owners, name)
			}
			if verb != graph.Keep {
				require.Equal(t, "7", a.Object.ResourceVersion, name)
			}
		}
	}
}

// TestDecideLiveObject: for a live object the same rules apply, and nothing in the graph changes.
func TestDecideLiveObject(t *testing.T) {
	for _, first := range ownerCases() {
		for _, second := range ownerCases() {
			if first == unknownOwner || second == unknownOwner {
				continue // known only after a lookup, which a live object does not cause
			}
			cases := []ownerCase{first, second}
			g := newGraph(10)
			live := object("d", addOwner(g, "owner-0", first), addOwner(g, "owner-1", second))
			live.ResourceVersion = "8"
			g.Observe(object("d"))
			before := g.Size()
			verb, policy, _ := expected(cases, false)
			a := g.Decide(graph.Item{UID: "d"}, &live)
			require.Equal(t, verb, a.Verb, "%v", cases)
			require.Equal(t, policy, a.Policy, "%v", cases)
			if verb != graph.Keep {
				require.Equal(t, "8", a.Object.ResourceVersion, "the write is bound to the live object")
			}
			require.Equal(t, before, g.Size())
			require.Equal(t, graph.Keep, g.Decide(graph.Item{UID: "d"}, nil).Verb, "the observed object has no owner")
		}
	}
}

// TestDecideFinalizers: an object that is being deleted waits for dependents, for orphaning, or for others.
func TestDecideFinalizers(t *testing.T) {
	for name, test := range map[string]struct {
		finalizers []string
		dependent  graph.Owner
		verb       graph.Verb
		finalizer  string
		state      graph.State
	}{
		"foreground, blocked":             {[]string{graph.FinalizerForeground}, blocking("d"), graph.Keep, "", graph.AwaitsDependents},
		"foreground, a dependent":         {[]string{graph.FinalizerForeground}, ownedBy("d"), graph.Finalize, graph.FinalizerForeground, graph.AwaitsDependents},
		"foreground, none":                {[]string{graph.FinalizerForeground}, ownedBy("other"), graph.Finalize, graph.FinalizerForeground, graph.AwaitsDependents},
		"orphan, a dependent":             {[]string{graph.FinalizerOrphan}, ownedBy("d"), graph.Keep, "", graph.AwaitsOrphaning},
		"orphan, none":                    {[]string{graph.FinalizerOrphan}, ownedBy("other"), graph.Finalize, graph.FinalizerOrphan, graph.AwaitsOrphaning},
		"orphan wins over foreground":     {[]string{graph.FinalizerForeground, graph.FinalizerOrphan}, blocking("d"), graph.Keep, "", graph.AwaitsOrphaning},
		"the finalizer of another":        {[]string{custom}, blocking("d"), graph.Keep, "", graph.AwaitsFinalizers},
		"no finalizer":                    {nil, blocking("d"), graph.Keep, "", graph.Terminating},
		"foreground before that of other": {[]string{custom, graph.FinalizerForeground}, ownedBy("other"), graph.Finalize, graph.FinalizerForeground, graph.AwaitsDependents},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGraph(10)
			g.Observe(object("other"))
			g.Observe(deleted(object("d"), test.finalizers...))
			g.Observe(object("dependent", test.dependent))
			a := g.Decide(graph.Item{UID: "d"}, nil)
			require.Equal(t, test.verb, a.Verb)
			require.Equal(t, test.finalizer, a.Finalizer)
			x, ok := g.Explain("d", 1)
			require.True(t, ok)
			require.Equal(t, test.state, x.State)
		})
	}
}
