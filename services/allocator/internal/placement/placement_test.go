package placement_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func agent(uid string, change func(*placement.Agent)) *placement.Agent {
	a := &placement.Agent{UID: uid, Ready: true, Capacity: 5, Images: map[string]struct{}{"i": {}}, Ports: map[int32]int{}}
	if change != nil {
		change(a)
	}
	return a
}

func TestChoose(t *testing.T) {
	req := &placement.Request{Image: "i", Ports: []int32{80}, Exclude: []string{"excluded"}}
	is := func(allocated, slots int, cached bool) func(*placement.Agent) {
		return func(a *placement.Agent) {
			a.Allocated, a.FreeSlots = allocated, slots
			if !cached {
				a.Images = nil
			}
		}
	}
	tests := map[string]struct {
		agents []*placement.Agent
		chosen string
		want   placement.Verdict
	}{
		"none":                    {nil, "", placement.Verdict{}},
		"the least loaded":        {[]*placement.Agent{agent("a", is(2, 0, true)), agent("b", is(1, 0, true)), agent("c", is(3, 0, true))}, "b", placement.Verdict{}},
		"of equals the first":     {[]*placement.Agent{agent("a", is(1, 0, true)), agent("b", is(1, 0, true))}, "a", placement.Verdict{}},
		"an image before load":    {[]*placement.Agent{agent("a", is(0, 0, false)), agent("b", is(4, 0, true))}, "b", placement.Verdict{}},
		"without it, if need be":  {[]*placement.Agent{agent("a", is(0, 0, false)), agent("b", is(5, 0, true))}, "a", placement.Verdict{}},
		"a slot before load":      {[]*placement.Agent{agent("a", is(0, 0, true)), agent("b", is(4, 1, true))}, "b", placement.Verdict{}},
		"one slot is enough":      {[]*placement.Agent{agent("a", is(1, 4, true)), agent("b", is(0, 1, true))}, "b", placement.Verdict{}},
		"an image before a slot":  {[]*placement.Agent{agent("a", is(0, 1, false)), agent("b", is(4, 0, true))}, "b", placement.Verdict{}},
		"a slot if there is none": {[]*placement.Agent{agent("a", is(0, 0, false)), agent("b", is(4, 1, false))}, "b", placement.Verdict{}},
		"each reason counts once": {[]*placement.Agent{
			agent("a", func(a *placement.Agent) { a.Ready = false }), agent("b", is(5, 0, true)),
			agent("excluded", nil), agent("d", func(a *placement.Agent) { a.Ports[80] = 1 }),
		}, "", placement.Verdict{NotReady: 1, Full: 1, Excluded: 1, Conflicting: 1, Port: 80}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := placement.Choose(test.agents, req)
			if test.chosen != "" {
				require.NotNil(t, got.Chosen)
				require.Equal(t, test.chosen, got.Chosen.UID)
				return
			}
			require.Equal(t, test.want, got)
		})
	}
}

// TestScoreIsTheOrderOfTheRule compares the numbers with the rule as it is written: image, slot, load.
func TestScoreIsTheOrderOfTheRule(t *testing.T) {
	type facts struct {
		cached, slot bool
		load         int
	}
	some := rapid.Custom(func(t *rapid.T) facts {
		load := rapid.OneOf(rapid.IntRange(0, 3), rapid.SampledFrom([]int{1000, 1001, placement.MaxLoad - 1, placement.MaxLoad}))
		return facts{rapid.Bool().Draw(t, "cached"), rapid.Bool().Draw(t, "slot"), load.Draw(t, "load")}
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := some.Draw(t, "a"), some.Draw(t, "b")
		better := false
		switch {
		case a.cached != b.cached:
			better = a.cached
		case a.slot != b.slot:
			better = a.slot
		default:
			better = a.load < b.load
		}
		score := func(f facts) uint64 { return placement.Score(placement.RankOf(f.load, f.slot), f.cached) }
		require.Equal(t, better, score(a) < score(b))
		require.Equal(t, a == b, score(a) == score(b))
	})
}

func TestRank(t *testing.T) {
	for _, load := range []int{0, 1, 70, placement.MaxLoad, math.MaxInt} {
		for _, slot := range []bool{true, false} {
			r := placement.RankOf(load, slot)
			require.Equal(t, slot, r.Slot())
			require.Equal(t, min(load, placement.MaxLoad), r.Load())
			require.Less(t, r, placement.Nowhere)
		}
	}
}

// TestChooseIsTheBestOfTheFit sorts all that fit, and takes the first.
func TestChooseIsTheBestOfTheFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var agents []*placement.Agent
		for _, uid := range []string{"a", "b", "c", "d", "e", "f"}[:rapid.IntRange(0, 6).Draw(t, "n")] {
			agents = append(agents, agent(uid, func(a *placement.Agent) {
				a.Ready = rapid.Bool().Draw(t, "ready")
				a.Allocated = rapid.IntRange(0, 6).Draw(t, "allocated")
				a.FreeSlots = rapid.IntRange(0, 2).Draw(t, "slots")
				a.Ports[rapid.Int32Range(1, 3).Draw(t, "port")]++
				if rapid.Bool().Draw(t, "no image") {
					a.Images = nil
				}
			}))
		}
		req := &placement.Request{Image: "i", Ports: []int32{rapid.Int32Range(1, 3).Draw(t, "wanted")}, Exclude: []string{"a"}}
		fit := slices.DeleteFunc(slices.Clone(agents), func(a *placement.Agent) bool {
			return !a.Ready || a.Allocated >= a.Capacity || a.Ports[req.Ports[0]] > 0 || a.UID == "a"
		})
		slices.SortStableFunc(fit, func(a, b *placement.Agent) int { return int(int64(a.Score("i")) - int64(b.Score("i"))) })
		got := placement.Choose(agents, req)
		if len(fit) > 0 {
			require.Same(t, fit[0], got.Chosen)
			return
		}
		require.Nil(t, got.Chosen)
		require.Equal(t, len(agents), got.NotReady+got.Full+got.Excluded+got.Conflicting, "each agent counts once")
	})
}
