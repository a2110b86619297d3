package desired_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func fresh(name string) desired.Agent { return desired.Agent{Name: name, Ready: true} }
func old(name string) desired.Agent   { return desired.Agent{Name: name, Ready: true, Outdated: true} }

func with(a desired.Agent, change ...func(*desired.Agent)) desired.Agent {
	for _, c := range change {
		c(&a)
	}
	return a
}

func busy(a *desired.Agent)     { a.Busy = true }
func unready(a *desired.Agent)  { a.Ready = false }
func draining(a *desired.Agent) { a.Draining = true }
func fixed(a *desired.Agent)    { a.Draining, a.Fixed = true, true }

func TestNext(t *testing.T) {
	p := desired.Pool{PoolMin: 2, PoolMax: 3, PerAgent: 5, BufferMax: 20}
	full := desired.Pool{PoolMin: 2, PoolMax: 2, PerAgent: 5, BufferMax: 20}
	big := desired.Pool{PoolMin: 8, PoolMax: 8, PerAgent: 5, BufferMax: 100}
	var eight []desired.Agent
	for _, n := range []string{"a", "b", "c", "d", "e", "f", "g", "h"} {
		eight = append(eight, with(old(n), busy))
	}
	type agents = []desired.Agent
	for name, tc := range map[string]struct {
		pool   desired.Pool
		load   desired.Load
		agents agents
		want   desired.Plan
	}{
		"nothing to do": {p, desired.Load{}, agents{fresh("a"), fresh("b")}, desired.Plan{}},
		"none":          {p, desired.Load{}, nil, desired.Plan{Create: 2}},

		// Missing agents.
		"draining agents have no capacity":        {p, desired.Load{}, agents{with(fresh("a"), fixed), fresh("b")}, desired.Plan{Create: 1}},
		"a draining agent is resumed":             {p, desired.Load{}, agents{with(fresh("a"), draining), fresh("b")}, desired.Plan{Resume: []string{"a"}}},
		"the busier of two":                       {p, desired.Load{}, agents{with(fresh("a"), draining), with(fresh("b"), draining, busy), fresh("c")}, desired.Plan{Resume: []string{"b"}}},
		"the ready one of two":                    {p, desired.Load{}, agents{with(fresh("a"), draining, unready, busy), with(fresh("b"), draining), fresh("c")}, desired.Plan{Resume: []string{"b"}}},
		"an agent is created rather than resumed": {p, desired.Load{}, agents{with(old("a"), draining), fresh("b")}, desired.Plan{Create: 1}},
		"resumed at the maximum":                  {full, desired.Load{}, agents{with(old("a"), draining), with(old("b"), draining), fresh("c")}, desired.Plan{Resume: []string{"a"}}},
		"fixed agents are not resumed":            {full, desired.Load{}, agents{with(fresh("a"), fixed), with(fresh("b"), fixed), fresh("c")}, desired.Plan{Create: 1}},
		"demand above poolMax":                    {full, desired.Load{Pending: 50}, agents{fresh("a"), fresh("b")}, desired.Plan{}},

		// Rollouts.
		"created first":                      {p, desired.Load{}, agents{old("a"), old("b")}, desired.Plan{Create: 1}},
		"resumed rather than created":        {big, desired.Load{}, append(agents{with(fresh("x"), draining)}, eight[:7]...), desired.Plan{Resume: []string{"x"}}},
		"waits for it":                       {p, desired.Load{}, agents{old("a"), old("b"), with(fresh("c"), unready)}, desired.Plan{}},
		"then drains":                        {p, desired.Load{}, agents{old("b"), old("a"), fresh("c")}, desired.Plan{Drain: []string{"a"}}},
		"at poolMax: drains first":           {full, desired.Load{}, agents{old("a"), fresh("b")}, desired.Plan{Drain: []string{"a"}}},
		"then creates":                       {full, desired.Load{}, agents{with(old("a"), draining, busy), fresh("b")}, desired.Plan{Create: 1}},
		"drains busy agents":                 {full, desired.Load{Active: 1}, agents{with(old("a"), busy), fresh("b")}, desired.Plan{Drain: []string{"a"}}},
		"drains idle agents first":           {full, desired.Load{Active: 1}, agents{with(old("a"), busy), old("b")}, desired.Plan{Drain: []string{"b"}}},
		"one at a time":                      {p, desired.Load{}, agents{old("a"), old("b"), with(old("c"), draining, busy)}, desired.Plan{}},
		"or a quarter of poolMax":            {big, desired.Load{Active: 30}, eight, desired.Plan{Drain: []string{"a", "b"}}},
		"swaps a draining agent in":          {full, desired.Load{}, agents{old("a"), fresh("b"), with(fresh("c"), draining, busy)}, desired.Plan{Drain: []string{"a"}}},
		"drains unready agents first":        {p, desired.Load{}, agents{with(old("b"), unready), old("a")}, desired.Plan{Drain: []string{"b"}}},
		"unready agents need no replacement": {p, desired.Load{}, agents{with(old("b"), unready), with(old("a"), unready)}, desired.Plan{Drain: []string{"a"}}},

		// Surplus agents.
		"surplus":                     {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(fresh("a"), busy), fresh("b")}, desired.Plan{Idle: []string{"b"}}},
		"not during a rollout":        {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(old("a"), busy), with(fresh("b"), unready)}, desired.Plan{}},
		"a rollout waits for a drain": {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(old("a"), busy), old("b"), with(old("c"), draining, busy)}, desired.Plan{Idle: []string{"b"}}},
		"poolMax was decreased":       {desired.Pool{PoolMax: 1, PerAgent: 5, BufferMax: 50}, desired.Load{}, agents{fresh("a"), fresh("b")}, desired.Plan{Idle: []string{"a"}}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, desired.Next(tc.pool, tc.load, tc.agents)) })
	}
}

// simulation carries plans out: agents that are created or resumed become ready, drained ones are deleted when they are not busy.
type simulation struct {
	pool   desired.Pool
	agents []desired.Agent
	made   int
}

func (s *simulation) load() desired.Load {
	var l desired.Load
	for _, a := range s.agents {
		if a.Busy && !a.Draining {
			l.Active++
		}
	}
	return l
}

func (s *simulation) step(t *rapid.T) bool {
	plan := desired.Next(s.pool, s.load(), s.agents)
	named := map[string]bool{}
	for _, n := range slices.Concat(plan.Resume, plan.Drain, plan.Idle) {
		require.False(t, named[n], "%s is a duplicate in %+v", n, plan)
		named[n] = true
	}
	for i := range s.agents {
		a := &s.agents[i]
		switch {
		case slices.Contains(plan.Resume, a.Name):
			require.True(t, a.Draining && !a.Fixed)
			a.Draining = false
		case slices.Contains(plan.Drain, a.Name):
			require.True(t, a.Outdated && !a.Draining)
			a.Draining = true
		case slices.Contains(plan.Idle, a.Name):
			require.False(t, a.Busy || a.Draining)
			a.Draining = true
		}
	}
	for range plan.Create {
		s.made++
		s.agents = append(s.agents, desired.Agent{Name: fmt.Sprint("new", s.made), Ready: true})
	}
	if plan.Create > 0 {
		held := 0
		for _, a := range s.agents {
			if !a.Fixed {
				held++
			}
		}
		require.LessOrEqual(t, held, s.pool.PoolMax+desired.Surge(s.pool), "too many Pods")
	}
	deleted := false
	s.agents = slices.DeleteFunc(s.agents, func(a desired.Agent) bool {
		deleted = deleted || a.Draining && !a.Busy
		return a.Draining && !a.Busy
	})
	return len(named) > 0 || plan.Create > 0 || deleted
}

// TestPlansConverge carries out the plans of a random pool: they end with the number of agents that the pool should have, while no
// sandbox ends and after all have ended. Then no outdated agent is left.
func TestPlansConverge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := &simulation{pool: desired.Pool{PerAgent: rapid.IntRange(1, 5).Draw(t, "per")}}
		p := &s.pool
		p.PoolMin = rapid.IntRange(0, 6).Draw(t, "min")
		p.PoolMax = p.PoolMin + rapid.IntRange(0, 6).Draw(t, "max")
		p.BufferMin = rapid.IntRange(0, 8).Draw(t, "bufMin")
		p.BufferMax = p.BufferMin + rapid.IntRange(0, 8).Draw(t, "bufMax")
		for i := range rapid.IntRange(0, 12).Draw(t, "agents") {
			a := desired.Agent{Name: fmt.Sprint(i), Busy: rapid.Bool().Draw(t, "busy"), Outdated: rapid.Bool().Draw(t, "outdated"),
				Draining: rapid.Bool().Draw(t, "draining")}
			a.Ready = !a.Outdated || rapid.Bool().Draw(t, "ready")
			a.Fixed = a.Draining && rapid.IntRange(0, 4).Draw(t, "fixed") == 0
			s.agents = append(s.agents, a)
		}
		settle := func() {
			for range 100 {
				if !s.step(t) {
					return
				}
			}
			t.Fatalf("does not converge: %+v", s.agents)
		}
		settle()
		serving := func() (n int) {
			for _, a := range s.agents {
				if !a.Draining {
					n++
				}
			}
			return n
		}
		require.GreaterOrEqual(t, serving(), desired.Count(*p, s.load()), "too few agents while sandboxes run")
		for i := range s.agents {
			s.agents[i].Busy = false
		}
		settle()
		require.GreaterOrEqual(t, serving(), desired.Count(*p, desired.Load{}))
		require.LessOrEqual(t, serving(), max(p.PoolMax, 0))
		for _, a := range s.agents {
			require.False(t, a.Outdated && !a.Fixed, "the rollout has not ended: %+v", s.agents)
			require.False(t, a.Draining && !a.Fixed)
		}
	})
}
