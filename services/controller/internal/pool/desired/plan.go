package desired

import (
	"cmp"
	"slices"
)

// Plan is the next step of a pool. An agent is named once at most.
type Plan struct {
	// Resume names draining agents that are to serve again.
	Resume []string
	// Create is how many agents to create.
	Create int
	// Drain names agents to drain now, for they are outdated.
	Drain []string
	// Idle names agents to drain once they have been idle, and too many, for a while.
	Idle []string
}

// Next is the next step of a pool with these agents. Whoever carries it out, with draining agents that go when they are
// empty, comes to an end at which Next has nothing to do.
//
// Agents that are missing come first: draining ones of the present template serve again, then new ones are created while
// the pool has no more than poolMax + Surge of them, then even outdated ones serve again.
//
// Then outdated agents are replaced, Surge at a time. Where poolMax has room the new one comes first; where it has not,
// the old one drains first, and is missing then. While an agent of the present template is not ready the rollout waits,
// and nobody goes: a template that does not work stops it at its first step. Agents that were not even ready go before
// all others, then idle ones, then those that have to be waited for.
//
// Last go those that are too many.
func Next(p Pool, l Load, agents []Agent) Plan {
	s := sort(agents)
	if missing := Count(p, l) - len(s.serving); missing > 0 {
		return s.grow(p, missing)
	}
	plan, goesOn := s.rollout(p, l)
	if !goesOn {
		plan.Idle = Surplus(p, l, agents)
	}
	return plan
}

// sorted are the agents of a pool by what can be done with them.
type sorted struct {
	// serving agents; outdated are those of them that a rollout replaces, in its order.
	serving, outdated []Agent
	// draining is the number of those that drain; fresh and old are those of them that could serve again, of the present
	// template or not.
	draining   int
	fresh, old []Agent
	// coming tells that an agent of the present template serves and is not ready; unready is the number of outdated ones
	// that serve and are not.
	coming  bool
	unready int
	// held is the number of agents that count towards the bound of Pods.
	held int
}

func sort(agents []Agent) sorted {
	var s sorted
	for _, a := range agents {
		if !a.Fixed {
			s.held++
		}
		switch {
		case !a.Draining && a.Outdated:
			s.serving, s.outdated = append(s.serving, a), append(s.outdated, a)
			if !a.Ready {
				s.unready++
			}
		case !a.Draining:
			s.serving = append(s.serving, a)
			s.coming = s.coming || !a.Ready
		default:
			s.draining++
			switch {
			case a.Fixed:
			case a.Outdated:
				s.old = append(s.old, a)
			default:
				s.fresh = append(s.fresh, a)
			}
		}
	}
	slices.SortFunc(s.outdated, func(a, b Agent) int {
		return cmp.Or(first(!a.Ready, !b.Ready), first(!a.Busy, !b.Busy), a.Created.Compare(b.Created), cmp.Compare(a.Name, b.Name))
	})
	for _, list := range [][]Agent{s.fresh, s.old} { // a busy one would have stayed anyway
		slices.SortFunc(list, func(a, b Agent) int {
			return cmp.Or(first(a.Ready, b.Ready), first(a.Busy, b.Busy), cmp.Compare(a.Name, b.Name))
		})
	}
	return s
}

// grow brings n more agents, or as many as may be had.
func (s sorted) grow(p Pool, n int) Plan {
	var plan Plan
	plan.Resume, n = take(s.fresh, n)
	plan.Create = min(n, max(p.PoolMax+Surge(p)-s.held, 0))
	back, _ := take(s.old, n-plan.Create)
	plan.Resume = append(plan.Resume, back...)
	return plan
}

// rollout replaces outdated agents; true if it has something to do or to wait for, so that nobody else goes.
func (s sorted) rollout(p Pool, l Load) (Plan, bool) {
	room := Surge(p) - (s.draining - len(s.fresh)) // fresh ones serve again as outdated ones go
	switch {
	case len(s.outdated) == 0:
		return Plan{}, false
	case s.coming:
		return Plan{}, true
	case room <= 0: // those that drain are waited for
		return Plan{}, false
	}
	n := min(room, len(s.outdated))
	spare := len(s.serving) - Count(p, l)
	switch {
	case s.unready > 0:
		n = min(n, s.unready)
	case spare > 0:
		n = min(n, spare)
	case len(s.serving) < p.PoolMax:
		return s.grow(p, min(n, p.PoolMax-len(s.serving))), true
	}
	var plan Plan
	plan.Drain, _ = take(s.outdated, n)
	return plan, true
}

// take names the first n of the agents, and returns how many are missing.
func take(agents []Agent, n int) ([]string, int) {
	var out []string
	for _, a := range agents[:min(n, len(agents))] {
		out = append(out, a.Name)
	}
	return out, n - len(out)
}
