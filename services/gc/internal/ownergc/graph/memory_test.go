package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestMemoryDropsTheOldest: deleted owners without dependents are remembered up to a limit, and looked up again after that.
func TestMemoryDropsTheOldest(t *testing.T) {
	for limit, remembered := range map[int][]bool{0: {false, false, false}, 1: {false, false, true}, 2: {false, true, true}, 3: {true, true, true}} {
		g := newGraph(limit)
		uids := []string{"first", "second", "third"}
		for _, uid := range uids {
			g.Observe(object(uid))
			g.Remove(object(uid))
		}
		for i, uid := range uids {
			fx := g.Observe(object("dependent-of-"+uid, ownedBy(uid)))
			require.Equal(t, remembered[i], len(asked(fx)) == 0, "limit %d, %s", limit, uid)
			require.Equal(t, remembered[i], len(due(fx)) == 1, "a dependent of a deleted owner is garbage: limit %d, %s", limit, uid)
		}
	}
}

// TestMemoryKeepsOwnersOfDependents beyond the limit: as long as a dependent refers to it, a deleted owner is not forgotten.
func TestMemoryKeepsOwnersOfDependents(t *testing.T) {
	g := newGraph(1)
	for _, uid := range []string{"first", "second", "third"} {
		g.Observe(object(uid))
		g.Observe(object("dependent-of-"+uid, ownedBy(uid)))
		g.Remove(object(uid))
	}
	require.Empty(t, asked(g.Pending()))
	require.Len(t, due(g.Pending()), 3)
	late := ownedBy("third")
	late.Version = "v2"
	require.Empty(t, asked(g.Observe(object("late", late))), "a deleted owner is deleted in every version")
}
