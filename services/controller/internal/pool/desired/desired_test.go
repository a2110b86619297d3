package desired_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestCount(t *testing.T) {
	p := desired.Pool{PoolMin: 1, PoolMax: 4, BufferMin: 2, BufferMax: 10, PerAgent: 5}
	for name, tc := range map[string]struct {
		pool desired.Pool
		load desired.Load
		want int
	}{
		"idle pool keeps poolMin":            {p, desired.Load{}, 1},
		"buffer fits beside the load":        {p, desired.Load{Active: 3}, 1},
		"buffer needs another agent":         {p, desired.Load{Active: 4}, 2},
		"pending sandboxes count":            {p, desired.Load{Active: 4, Pending: 5}, 3},
		"never above poolMax":                {p, desired.Load{Active: 20, Pending: 50}, 4},
		"nothing needed":                     {desired.Pool{PoolMax: 3, PerAgent: 5}, desired.Load{}, 0},
		"buffer only":                        {desired.Pool{PoolMax: 3, BufferMin: 1, PerAgent: 5}, desired.Load{}, 1},
		"poolMax is zero":                    {desired.Pool{PoolMax: 0, BufferMin: 4, PerAgent: 5}, desired.Load{Pending: 3}, 0},
		"capacity of one each":               {desired.Pool{PoolMax: 9, BufferMin: 1, PerAgent: 1}, desired.Load{Active: 2, Pending: 1}, 4},
		"exact fit":                          {desired.Pool{PoolMax: 9, PerAgent: 5}, desired.Load{Active: 10}, 2},
		"three sandboxes need the same port": {p, desired.Load{Active: 1, Pending: 2, PortDemand: 3}, 3},
		"ports within poolMax":               {p, desired.Load{Active: 1, Pending: 8, PortDemand: 9}, 4},
		"invalid capacity counts as one":     {desired.Pool{PoolMax: 9}, desired.Load{Active: 2}, 2},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, desired.Count(tc.pool, tc.load)) })
	}
}

func TestSurplus(t *testing.T) {
	at := func(m int) time.Time { return time.Date(2030, 1, 1, 0, m, 0, 0, time.UTC) }
	p := desired.Pool{PoolMin: 1, PoolMax: 4, BufferMin: 2, BufferMax: 10, PerAgent: 5}
	idle := func(name string, m int) desired.Agent { return desired.Agent{Name: name, Ready: true, Created: at(m)} }
	busy := desired.Agent{Name: "busy", Busy: true, Ready: true, Created: at(9)}
	for name, tc := range map[string]struct {
		pool   desired.Pool
		load   desired.Load
		agents []desired.Agent
		want   []string
	}{
		"within the buffer":                   {p, desired.Load{}, []desired.Agent{idle("a", 1), idle("b", 2)}, nil},
		"above bufferMax: the youngest":       {p, desired.Load{}, []desired.Agent{idle("a", 1), idle("b", 2), idle("c", 3)}, []string{"c"}},
		"unready agents first":                {p, desired.Load{}, []desired.Agent{{Name: "a", Created: at(1)}, idle("b", 2), idle("c", 3)}, []string{"a"}},
		"outdated agents before younger ones": {p, desired.Load{}, []desired.Agent{{Name: "a", Ready: true, Outdated: true, Created: at(1)}, idle("b", 2), idle("c", 3)}, []string{"a"}},
		"busy agents stay":                    {p, desired.Load{Active: 1}, []desired.Agent{busy, {Name: "b2", Busy: true}, {Name: "b3", Busy: true}, {Name: "b4", Busy: true}}, nil},
		"poolMin stays":                       {desired.Pool{PoolMin: 3, PoolMax: 4, BufferMax: 0, PerAgent: 5}, desired.Load{}, []desired.Agent{idle("a", 1), idle("b", 2), idle("c", 3)}, nil},
		"above poolMax":                       {desired.Pool{PoolMax: 1, BufferMin: 1, BufferMax: 100, PerAgent: 5}, desired.Load{}, []desired.Agent{idle("a", 1), idle("b", 2)}, []string{"b"}},
		"poolMax is zero":                     {desired.Pool{PerAgent: 5, BufferMin: 3, BufferMax: 9}, desired.Load{}, []desired.Agent{idle("a", 1), busy}, []string{"a"}},
		"draining agents have no capacity":    {p, desired.Load{}, []desired.Agent{idle("a", 1), {Name: "b", Ready: true, Draining: true}, idle("c", 3)}, nil},
		"no agents":                           {p, desired.Load{}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, desired.Surplus(tc.pool, tc.load, tc.agents)) })
	}
}

// TestProperties checks random pools, loads and agents: Count is within the pool's bounds, busy agents are never surplus, and
// without its surplus agents a pool has no more of them.
func TestProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := desired.Pool{PerAgent: rapid.IntRange(1, 20).Draw(t, "per")}
		p.PoolMin = rapid.IntRange(0, 10).Draw(t, "min")
		p.PoolMax = p.PoolMin + rapid.IntRange(0, 10).Draw(t, "max")
		p.BufferMin = rapid.IntRange(0, 50).Draw(t, "bufMin")
		p.BufferMax = p.BufferMin + rapid.IntRange(0, 50).Draw(t, "bufMax")
		l := desired.Load{Active: rapid.IntRange(0, 200).Draw(t, "active"), Pending: rapid.IntRange(0, 50).Draw(t, "pending")}
		l.PortDemand = rapid.IntRange(0, l.Active+l.Pending).Draw(t, "ports")

		n := desired.Count(p, l)
		require.GreaterOrEqual(t, n, p.PoolMin)
		require.LessOrEqual(t, n, p.PoolMax)
		if n < p.PoolMax {
			require.GreaterOrEqual(t, n*p.PerAgent, l.Active+l.Pending+p.BufferMin, "capacity for all and the buffer")
		}
		more := desired.Load{Active: l.Active + 1, Pending: l.Pending, PortDemand: l.PortDemand}
		require.GreaterOrEqual(t, desired.Count(p, more), n, "more load needs fewer agents")

		var agents []desired.Agent
		busy := map[string]bool{}
		for i := range rapid.IntRange(0, 25).Draw(t, "agents") {
			a := desired.Agent{Name: fmt.Sprint(i), Busy: rapid.Bool().Draw(t, "busy"), Ready: rapid.Bool().Draw(t, "ready")}
			busy[a.Name] = a.Busy
			agents = append(agents, a)
		}
		surplus := map[string]bool{}
		for _, name := range desired.Surplus(p, l, agents) {
			require.False(t, busy[name], "a busy agent is surplus")
			require.False(t, surplus[name], "duplicate")
			surplus[name] = true
		}
		if len(surplus) > 0 {
			require.GreaterOrEqual(t, len(agents)-len(surplus), n, "fewer than Count")
		}
		var rest []desired.Agent
		for _, a := range agents {
			if !surplus[a.Name] {
				rest = append(rest, a)
			}
		}
		require.Empty(t, desired.Surplus(p, l, rest), "surplus after shrinking")
	})
}
