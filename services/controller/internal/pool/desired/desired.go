// Package desired decides how many agents a pool should have, and which of them are created, drained and resumed. It is pure, and
// may be called concurrently.
package desired

import (
	"cmp"
	"slices"
	"time"
)

// Pool is the specification of a pool. All numbers are at least 0, PerAgent is at least 1.
type Pool struct {
	// PoolMin and PoolMax bound the number of serving agents: those that are not draining.
	PoolMin, PoolMax int
	// BufferMin and BufferMax bound the free capacity.
	BufferMin, BufferMax int
	// PerAgent is the capacity of one agent.
	PerAgent int
}

// Load is the demand for capacity on serving agents. A sandbox on a draining agent ends there and needs no other capacity.
type Load struct {
	// Active is the capacity in use on serving agents; Pending is the number of sandboxes that wait for an agent.
	Active, Pending int
	// PortDemand is the largest number of sandboxes, active or pending, that need the same port. An agent has each port once, so
	// that this many agents are needed, whatever their free capacity. Zero if no sandbox waits.
	PortDemand int
}

// Agent is an agent whose Pod has neither terminated nor been deleted.
type Agent struct {
	// Name identifies it.
	Name string
	// Busy: it has, or may have, a sandbox or a reservation.
	Busy bool
	// Ready: its Pod is ready.
	Ready bool
	// Outdated: it was created from another template than the pool's current one.
	Outdated bool
	// Draining: it accepts no new sandboxes and is deleted when it has none. It has no capacity.
	Draining bool
	// Fixed: it cannot be resumed, because a person drains it or because it does not answer.
	Fixed bool
	// Created is when it was created.
	Created time.Time
}

// Count returns the number of serving agents that the pool should have: enough for all active and pending sandboxes and a free
// capacity of bufferMin, within poolMin and poolMax.
func Count(p Pool, l Load) int {
	per := max(p.PerAgent, 1)
	need := (l.Active + l.Pending + p.BufferMin + per - 1) / per
	return min(max(need, l.PortDemand, p.PoolMin), max(p.PoolMax, 0))
}

// Surge returns how many agents a rollout drains at a time, and so how many Pods a pool may have beyond poolMax: a quarter of
// poolMax, rounded up, at least one. Draining agents do not count toward poolMax, because long-running sandboxes would keep the
// pool from its size. Surge keeps a rollout from doubling the pool.
func Surge(p Pool) int { return max((p.PoolMax+3)/4, 1) }

// Surplus returns the names of idle agents that are surplus: those above poolMax, and those without which the free capacity is
// still at least bufferMax and the number of agents is still Count. Agents that are not ready come first, then outdated ones,
// then the youngest. Busy agents are never surplus.
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
