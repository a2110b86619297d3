// Package desired decides how many agents a pool should have and which may go. It is pure: numbers in, numbers out.
package desired

import (
	"cmp"
	"slices"
	"time"
)

// Pool is what a pool asks for. All numbers are at least 0, PerAgent at least 1.
type Pool struct {
	// PoolMin and PoolMax bound the number of agents.
	PoolMin, PoolMax int
	// BufferMin and BufferMax bound the number of free places.
	BufferMin, BufferMax int
	// PerAgent is the number of places of one agent.
	PerAgent int
}

// Load is what is asked of a pool.
type Load struct {
	// Active sandboxes are assigned to the pool's agents; Pending ones wait for a place.
	Active, Pending int
	// PortDemand is the greatest number of sandboxes, active or pending, that need one same port. An agent has each port
	// once, so that it takes as many agents, however many places are free. Zero if no sandbox waits.
	PortDemand int
}

// Agent is one agent that counts: neither failed nor on its way out.
type Agent struct {
	// Name identifies it.
	Name string
	// Busy tells that it has, or may have, a sandbox or a reservation. A busy agent never goes.
	Busy bool
	// Ready tells that it takes sandboxes.
	Ready bool
	// Outdated tells that it was made from another template than the pool's present one.
	Outdated bool
	// Created is when it was created.
	Created time.Time
}

// Count is the number of agents that the pool should have: enough for all active and pending sandboxes and bufferMin
// free places, within poolMin and poolMax.
func Count(p Pool, l Load) int {
	per := max(p.PerAgent, 1)
	need := (l.Active + l.Pending + p.BufferMin + per - 1) / per
	return min(max(need, l.PortDemand, p.PoolMin), max(p.PoolMax, 0))
}

// Missing is how many agents have to be created.
func Missing(p Pool, l Load, current int) int { return max(Count(p, l)-current, 0) }

// Surplus names the agents that may go now. Agents above poolMax go as soon as they are idle; apart from those, idle
// agents go while more than bufferMax places are free and what is left still is what Count wants. Those go first that are
// not ready, then outdated ones, then the youngest. Busy agents are never named.
func Surplus(p Pool, l Load, agents []Agent) []string {
	var idle []Agent
	for _, a := range agents {
		if !a.Busy {
			idle = append(idle, a)
		}
	}
	slices.SortFunc(idle, func(a, b Agent) int {
		return cmp.Or(first(!a.Ready, !b.Ready), first(a.Outdated, b.Outdated), b.Created.Compare(a.Created), cmp.Compare(a.Name, b.Name))
	})
	want, left := Count(p, l), len(agents)
	var out []string
	for _, a := range idle {
		free := left*max(p.PerAgent, 1) - l.Active - l.Pending
		if left <= want || left <= p.PoolMax && free <= p.BufferMax {
			break
		}
		out = append(out, a.Name)
		left--
	}
	return out
}

// Rollout takes the next step from outdated agents to ones of the present template: create one more first, where poolMax
// has room for it, and when all agents are ready again, let an idle outdated one go. It waits while any agent is not
// ready, and never names a busy agent: outdated ones go as their sandboxes do.
func Rollout(p Pool, l Load, agents []Agent) (create int, remove string) {
	for _, a := range agents {
		if !a.Ready {
			return 0, ""
		}
		if a.Outdated && !a.Busy && (remove == "" || a.Name < remove) {
			remove = a.Name
		}
	}
	if remove != "" && len(agents) <= Count(p, l) && len(agents) < p.PoolMax {
		return 1, ""
	}
	return 0, remove
}

func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}
