package desired

import (
	"cmp"
	"slices"
)

// Plan is the next step of a pool. It names an agent at most once.
type Plan struct {
	// Resume are draining agents that shall serve again.
	Resume []string
	// Create is how many agents to create.
	Create int
	// Drain are outdated agents to drain now.
	Drain []string
	// Idle are agents to drain after they have been surplus for a while.
	Idle []string
}

// Next returns the next step of a pool with these agents. If it is carried out repeatedly, and draining agents are deleted when
// they are empty, Next eventually has nothing to do.
//
// Missing agents come first: draining agents of the current template are resumed, then new ones are created as long as the pool
// has at most poolMax + Surge agents, then even outdated agents are resumed.
//
// Then outdated agents are replaced, Surge at a time. If the pool is below poolMax, the new agent is created first; otherwise the
// old one is drained first, and is missing then. The rollout waits while an agent of the current template is not ready, and no
// agent is drained meanwhile: a template that does not work stops it at its first step. Agents that are not ready are drained
// first, then idle ones, then busy ones.
//
// Surplus agents are drained last.
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

// sorted groups the agents of a pool.
type sorted struct {
	// serving agents, and those of them that a rollout replaces, in its order.
	serving, outdated []Agent
	// draining is the number of draining agents; fresh and old are those of them that can be resumed, up to date with the
	// template or not.
	draining   int
	fresh, old []Agent
	// coming: a serving agent that is up to date with the template is not ready. unready is the number of outdated serving agents
	// that are not ready.
	coming  bool
	unready int
	// held is the number of agents that count toward the maximum number of Pods.
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
	for _, list := range [][]Agent{s.fresh, s.old} { // a busy agent would have stayed anyway
		slices.SortFunc(list, func(a, b Agent) int {
			return cmp.Or(first(a.Ready, b.Ready), first(a.Busy, b.Busy), cmp.Compare(a.Name, b.Name))
		})
	}
	return s
}

// grow returns a plan for up to n more agents.
func (s sorted) grow(p Pool, n int) Plan {
	var plan Plan
	plan.Resume, n = take(s.fresh, n)
	plan.Create = min(n, max(p.PoolMax+Surge(p)-s.held, 0))
	back, _ := take(s.old, n-plan.Create)
	plan.Resume = append(plan.Resume, back...)
	return plan
}

// rollout replaces outdated agents. It reports whether it has something to do or to wait for, so that no surplus agent is
// drained.
func (s sorted) rollout(p Pool, l Load) (Plan, bool) {
	room := Surge(p) - (s.draining - len(s.fresh)) // fresh agents are resumed as outdated ones are drained
	switch {
	case len(s.outdated) == 0:
		return Plan{}, false
	case s.coming:
		return Plan{}, true
	case room <= 0: // waits for draining agents
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

// take returns the names of the first n agents, and how many are missing.
func take(agents []Agent, n int) ([]string, int) {
	var out []string
	for _, a := range agents[:min(n, len(agents))] {
		out = append(out, a.Name)
	}
	return out, n - len(out)
}
