package ctrd_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/ctrd"
)

func TestGroups(t *testing.T) {
	g := ctrd.NewGroups()
	require.Equal(t, "a", g.Join("a", "a"))
	require.Equal(t, "a", g.Join("b", "a"))
	g.Leave("a")
	require.True(t, g.Joined("a"), "b has not left")
	require.Equal(t, "a", g.Join("c", "a"))
	g.Leave("b")
	g.Leave("b")
	g.Leave("of another process")
	require.True(t, g.Joined("a"), "c has not left")
	g.Leave("c")
	require.False(t, g.Joined("a"))
	require.Equal(t, "d", g.Join("d", "a"), "the shim of a may be ending")
	require.Equal(t, "d", g.Join("e", "a"))
	require.False(t, g.Joined("a"))
	require.Equal(t, "f", g.Join("f", "f"))
	require.True(t, g.Joined("d"))
}

// TestEndedGroupIsNotJoined lets slots join and leave at random.
func TestEndedGroupIsNotJoined(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := ctrd.NewGroups()
		group, ended := map[string]string{}, map[string]bool{}
		used := map[string]bool{}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			id := rapid.StringMatching("[a-f][0-9]").Draw(t, "slot")
			if of, ok := group[id]; ok {
				g.Leave(id)
				delete(group, id)
				ended[of] = !g.Joined(of)
			} else if !used[id] { // an id is never used again
				used[id] = true
				group[id] = g.Join(id, rapid.SampledFrom([]string{id, "a0", "b0"}).Draw(t, "group"))
				require.False(t, ended[group[id]], "%s joined %s", id, group[id])
			}
			members := map[string]bool{}
			for _, of := range group {
				members[of] = true
			}
			for _, of := range []string{"a0", "b0", id} {
				require.Equal(t, members[of], g.Joined(of), of)
			}
		}
	})
}
