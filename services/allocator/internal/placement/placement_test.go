package placement_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

func agent(uid string, change func(*placement.Agent)) *placement.Agent {
	a := &placement.Agent{UID: uid, Accepting: true, Heard: 10, Capacity: 5, Images: map[string]struct{}{"i": {}}, Ports: map[int32]int{}}
	if change != nil {
		change(a)
	}
	return a
}

func TestChoose(t *testing.T) {
	req := &placement.Request{Image: "i", Ports: []int32{80}, Exclude: []string{"excluded"}, HeardSince: 5}
	loaded := func(n int) func(*placement.Agent) { return func(a *placement.Agent) { a.Allocated = n } }
	tests := map[string]struct {
		agents []*placement.Agent
		chosen string
		want   placement.Verdict
	}{
		"none":                   {nil, "", placement.Verdict{}},
		"the least loaded":       {[]*placement.Agent{agent("a", loaded(2)), agent("b", loaded(1)), agent("c", loaded(3))}, "b", placement.Verdict{}},
		"of equals the first":    {[]*placement.Agent{agent("a", loaded(1)), agent("b", loaded(1))}, "a", placement.Verdict{}},
		"an image before load":   {[]*placement.Agent{agent("a", func(a *placement.Agent) { a.Images = nil }), agent("b", loaded(4))}, "b", placement.Verdict{}},
		"without it, if need be": {[]*placement.Agent{agent("a", func(a *placement.Agent) { a.Images = nil }), agent("b", loaded(5))}, "a", placement.Verdict{}},
		"each reason counts once": {[]*placement.Agent{
			agent("a", func(a *placement.Agent) { a.Accepting = false }), agent("b", func(a *placement.Agent) { a.Heard = 4 }),
			agent("c", loaded(5)), agent("excluded", nil), agent("d", func(a *placement.Agent) { a.Ports[80] = 1 }),
		}, "", placement.Verdict{NotReady: 2, Full: 1, Excluded: 1, Conflicting: 1, Port: 80}},
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

// TestChooseIsTheBestOfTheFit compares with a choice that looks at everything.
func TestChooseIsTheBestOfTheFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var agents []*placement.Agent
		for i := range rapid.IntRange(0, 6).Draw(t, "n") {
			agents = append(agents, agent(fmt.Sprint(i), func(a *placement.Agent) {
				a.Accepting = rapid.Bool().Draw(t, "accepting")
				a.Heard = rapid.Int64Range(0, 10).Draw(t, "heard")
				a.Allocated = rapid.IntRange(0, 6).Draw(t, "allocated")
				a.Ports[rapid.Int32Range(1, 3).Draw(t, "port")]++
				if rapid.Bool().Draw(t, "no image") {
					a.Images = nil
				}
			}))
		}
		req := &placement.Request{Image: "i", Ports: []int32{rapid.Int32Range(1, 3).Draw(t, "wanted")}, Exclude: []string{"0"}, HeardSince: 5}
		var best *placement.Agent
		for _, a := range agents {
			fits := a.Accepting && a.Heard >= 5 && a.Allocated < a.Capacity && a.Ports[req.Ports[0]] == 0 && a.UID != "0"
			if fits && (best == nil || placement.Score(a, "i") < placement.Score(best, "i")) {
				best = a
			}
		}
		got := placement.Choose(agents, req)
		if got.Chosen != best {
			t.Fatalf("chose %v, want %v", got.Chosen, best)
		}
		if best == nil && got.NotReady+got.Full+got.Excluded+got.Conflicting != len(agents) {
			t.Fatalf("%+v counts not each of %d agents once", got, len(agents))
		}
	})
}
