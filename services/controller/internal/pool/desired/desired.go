// Package desired decides how many agents a pool should have, and which of them come, drain and go. It is pure: numbers
// in, numbers out.
package desired

import (
	"cmp"
	"slices"
	"time"
)

// Pool is what a pool asks for. All numbers are at least 0, PerAgent at least 1.
type Pool struct {
	// PoolMin and PoolMax bound the number of agents that serve: that do not drain.
	PoolMin, PoolMax int
	// BufferMin and BufferMax bound the number of free places.
	BufferMin, BufferMax int
	// PerAgent is the number of places of one agent.
	PerAgent int
}

// Load is what is asked of the agents that serve. What runs on a draining agent ends there and needs no other place.
type Load struct {
	// Active sandboxes are assigned to agents that serve; Pending ones wait for a place.
	Active, Pending int
	// PortDemand is the greatest number of sandboxes, active or pending, that need one same port. An agent has each port
	// once, so that it takes as many agents, however many places are free. Zero if no sandbox waits.
	PortDemand int
}

// Agent is one agent that counts: neither failed nor on its way out.
type Agent struct {
	// Name identifies it.
	Name string
	// Busy tells that it has, or may have, a sandbox or a reservation.
	Busy bool
	// Ready tells that it is well.
	Ready bool
	// Outdated tells that it was made from another template than the pool's present one.
	Outdated bool
	// Draining tells that it takes no new sandboxes and goes when the last one has left it. It is no capacity.
	Draining bool
	// Fixed tells that it drains whatever this package thinks of it: a person has it drained, or it does not answer.
	Fixed bool
	// Created is when it was created.
	Created time.Time
}

// Count is the number of serving agents that the pool should have: enough for all active and pending sandboxes and
// bufferMin free places, within poolMin and poolMax.
func Count(p Pool, l Load) int {
	per := max(p.PerAgent, 1)
	need := (l.Active + l.Pending + p.BufferMin + per - 1) / per
	return min(max(need, l.PortDemand, p.PoolMin), max(p.PoolMax, 0))
}

// Surge is how many agents a rollout drains at a time, and so how many Pods a pool may have beyond poolMax: a quarter of
// poolMax, rounded up, at least one. Draining agents do not count against poolMax, or sandboxes that run for long would
// keep a pool from its size; a bound of their own keeps a rollout from doubling the pool.
func Surge(p Pool) int { return max((p.PoolMax+3)/4, 1) }

// Surplus names the serving agents that are too many. Agents above poolMax are once they are idle; apart from those, idle
// agents are while more than bufferMax places are free and what is left still is what Count wants. Those come first that
// are not ready, then outdated ones, then the youngest. Busy agents are never named.
func Surplus(p Pool, l Load, agents []Agent) []string {
	var idle []Agent
	left := 0
	for _, a := range agents {
		if a.Draining {
			continue
		}
		left++
		if !a.Busy {
			idle = append(idle, a)
		}
	}
	slices.SortFunc(idle, func(a, b Agent) int {
		return cmp.Or(first(!a.Ready, !b.Ready), first(a.Outdated, b.Outdated), b.Created.Compare(a.Created), cmp.Compare(a.Name, b.Name))
	})
	want := Count(p, l)
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
