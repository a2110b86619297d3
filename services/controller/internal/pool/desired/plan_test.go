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
		"all is well": {p, desired.Load{}, agents{fresh("a"), fresh("b")}, desired.Plan{}},
		"none":        {p, desired.Load{}, nil, desired.Plan{Create: 2}},

		// What is missing.
		"draining agents are no capacity":             {p, desired.Load{}, agents{with(fresh("a"), fixed), fresh("b")}, desired.Plan{Create: 1}},
		"a draining one serves again":                 {p, desired.Load{}, agents{with(fresh("a"), draining), fresh("b")}, desired.Plan{Resume: []string{"a"}}},
		"the busy one of two does":                    {p, desired.Load{}, agents{with(fresh("a"), draining), with(fresh("b"), draining, busy), fresh("c")}, desired.Plan{Resume: []string{"b"}}},
		"one that is ready before one that is not":    {p, desired.Load{}, agents{with(fresh("a"), draining, unready, busy), with(fresh("b"), draining), fresh("c")}, desired.Plan{Resume: []string{"b"}}},
		"an outdated one does not while one may come": {p, desired.Load{}, agents{with(old("a"), draining), fresh("b")}, desired.Plan{Create: 1}},
		"it does when no more may":                    {full, desired.Load{}, agents{with(old("a"), draining), with(old("b"), draining), fresh("c")}, desired.Plan{Resume: []string{"a"}}},
		"one that must drain never does":              {full, desired.Load{}, agents{with(fresh("a"), fixed), with(fresh("b"), fixed), fresh("c")}, desired.Plan{Create: 1}},
		"demand beyond what poolMax has":              {full, desired.Load{Pending: 50}, agents{fresh("a"), fresh("b")}, desired.Plan{}},

		// The template has changed.
		"a new one comes first":                       {p, desired.Load{}, agents{old("a"), old("b")}, desired.Plan{Create: 1}},
		"one that drains serves instead of a new one": {big, desired.Load{}, append(agents{with(fresh("x"), draining)}, eight[:7]...), desired.Plan{Resume: []string{"x"}}},
		"it is waited for":                            {p, desired.Load{}, agents{old("a"), old("b"), with(fresh("c"), unready)}, desired.Plan{}},
		"then one goes":                               {p, desired.Load{}, agents{old("b"), old("a"), fresh("c")}, desired.Plan{Drain: []string{"a"}}},
		"no room: one drains first":                   {full, desired.Load{}, agents{old("a"), fresh("b")}, desired.Plan{Drain: []string{"a"}}},
		"and is missing then":                         {full, desired.Load{}, agents{with(old("a"), draining, busy), fresh("b")}, desired.Plan{Create: 1}},
		"a busy one drains, too":                      {full, desired.Load{Active: 1}, agents{with(old("a"), busy), fresh("b")}, desired.Plan{Drain: []string{"a"}}},
		"an idle one before a busy one":               {full, desired.Load{Active: 1}, agents{with(old("a"), busy), old("b")}, desired.Plan{Drain: []string{"b"}}},
		"one at a time":                               {p, desired.Load{}, agents{old("a"), old("b"), with(old("c"), draining, busy)}, desired.Plan{}},
		"or a quarter of poolMax":                     {big, desired.Load{Active: 30}, eight, desired.Plan{Drain: []string{"a", "b"}}},
		"a fresh one that drains is swapped in":       {full, desired.Load{}, agents{old("a"), fresh("b"), with(fresh("c"), draining, busy)}, desired.Plan{Drain: []string{"a"}}},
		"one that was not ready goes first":           {p, desired.Load{}, agents{with(old("b"), unready), old("a")}, desired.Plan{Drain: []string{"b"}}},
		"what is not ready goes without a spare":      {p, desired.Load{}, agents{with(old("b"), unready), with(old("a"), unready)}, desired.Plan{Drain: []string{"a"}}},

		// Too many.
		"an idle one too many":            {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(fresh("a"), busy), fresh("b")}, desired.Plan{Idle: []string{"b"}}},
		"nobody goes while a rollout is":  {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(old("a"), busy), with(fresh("b"), unready)}, desired.Plan{}},
		"unless it waits for one to end":  {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{Active: 1}, agents{with(old("a"), busy), old("b"), with(old("c"), draining, busy)}, desired.Plan{Idle: []string{"b"}}},
		"poolMax that fell below the few": {desired.Pool{PoolMax: 1, PerAgent: 5, BufferMax: 50}, desired.Load{}, agents{fresh("a"), fresh("b")}, desired.Plan{Idle: []string{"a"}}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, desired.Next(tc.pool, tc.load, tc.agents)) })
	}
}

// world carries plans out: agents that are created or resumed become ready, drained ones go once they are not busy.
type world struct {
	pool   desired.Pool
	agents []desired.Agent
	made   int
}

func (w *world) load() desired.Load {
	var l desired.Load
	for _, a := range w.agents {
		if a.Busy && !a.Draining {
			l.Active++
		}
	}
	return l
}

func (w *world) step(t *rapid.T) bool {
	plan := desired.Next(w.pool, w.load(), w.agents)
	named := map[string]bool{}
	for _, n := range slices.Concat(plan.Resume, plan.Drain, plan.Idle) {
		require.False(t, named[n], "%s is named twice in %+v", n, plan)
		named[n] = true
	}
	for i := range w.agents {
		a := &w.agents[i]
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
		w.made++
		w.agents = append(w.agents, desired.Agent{Name: fmt.Sprint("new", w.made), Ready: true})
	}
	if plan.Create > 0 {
		held := 0
		for _, a := range w.agents {
			if !a.Fixed {
				held++
			}
		}
		require.LessOrEqual(t, held, w.pool.PoolMax+desired.Surge(w.pool), "too many Pods")
	}
	gone := false
	w.agents = slices.DeleteFunc(w.agents, func(a desired.Agent) bool {
		gone = gone || a.Draining && !a.Busy
		return a.Draining && !a.Busy
	})
	return len(named) > 0 || plan.Create > 0 || gone
}

// TestPlansComeToAnEnd: whatever the pool and its agents, carrying the plans out ends, at a pool that has what it should
// have; with sandboxes that never end as well as when they all do, and then no outdated agent is left.
func TestPlansComeToAnEnd(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{pool: desired.Pool{PerAgent: rapid.IntRange(1, 5).Draw(t, "per")}}
		p := &w.pool
		p.PoolMin = rapid.IntRange(0, 6).Draw(t, "min")
		p.PoolMax = p.PoolMin + rapid.IntRange(0, 6).Draw(t, "max")
		p.BufferMin = rapid.IntRange(0, 8).Draw(t, "bufMin")
		p.BufferMax = p.BufferMin + rapid.IntRange(0, 8).Draw(t, "bufMax")
		for i := range rapid.IntRange(0, 12).Draw(t, "agents") {
			a := desired.Agent{Name: fmt.Sprint(i), Busy: rapid.Bool().Draw(t, "busy"), Outdated: rapid.Bool().Draw(t, "outdated"),
				Draining: rapid.Bool().Draw(t, "draining")}
			a.Ready = !a.Outdated || rapid.Bool().Draw(t, "ready")
			a.Fixed = a.Draining && rapid.IntRange(0, 4).Draw(t, "fixed") == 0
			w.agents = append(w.agents, a)
		}
		settle := func() {
			for range 100 {
				if !w.step(t) {
					return
				}
			}
			t.Fatalf("no end: %+v", w.agents)
		}
		settle()
		serving := func() (n int) {
			for _, a := range w.agents {
				if !a.Draining {
					n++
				}
			}
			return n
		}
		require.GreaterOrEqual(t, serving(), desired.Count(*p, w.load()), "sandboxes that never end keep a pool from its size")
		for i := range w.agents {
			w.agents[i].Busy = false
		}
		settle()
		require.GreaterOrEqual(t, serving(), desired.Count(*p, desired.Load{}))
		require.LessOrEqual(t, serving(), max(p.PoolMax, 0))
		for _, a := range w.agents {
			require.False(t, a.Outdated && !a.Fixed, "the rollout has not ended: %+v", w.agents)
			require.False(t, a.Draining && !a.Fixed)
		}
	})
}
