// Package placement chooses the agent for a sandbox. It owns the rule alone (seed 001, section 3.2): filter by readiness,
// exclusion, room and ports, then score by load and image. It keeps no state, does no I/O and takes no locks: the caller
// (the registry, under its lock) lends it the agents. Pure.
package placement

import "slices"

// MissingImage is added to the score of an agent whose node lacks the image: a pull costs more than any load.
const MissingImage = 1000

// Agent is what placement needs to know of one agent. The registry owns and changes it.
type Agent struct {
	// UID of the agent's Pod.
	UID string
	// Accepting tells whether the agent takes new sandboxes.
	Accepting bool
	// Heard is when the agent was last heard of, in nanoseconds of the caller's clock.
	Heard int64
	// Capacity is the number of places, Allocated how many are taken.
	Capacity, Allocated int
	// Images are the normalised references of the images on the agent's node.
	Images map[string]struct{}
	// Ports counts, for each TCP port, who has it: the agent itself and its sandboxes.
	Ports map[int32]int
}

// Request is what a sandbox needs.
type Request struct {
	// Image is a normalised image reference.
	Image string
	// Ports that must be free.
	Ports []int32
	// Exclude holds uids of agents that must not be chosen.
	Exclude []string
	// HeardSince is the time before which a last word makes an agent not ready.
	HeardSince int64
}

// Verdict is the outcome of a choice, with the reasons why agents were passed over. Each agent counts once at most.
type Verdict struct {
	// Chosen is the best agent, nil if there is none.
	Chosen *Agent
	// NotReady, Excluded, Full and Conflicting count the agents that were passed over when Chosen is nil.
	NotReady, Excluded, Full, Conflicting int
	// Port is a port that is taken on a conflicting agent.
	Port int32
}

// Score is the cost of placing a sandbox with the image on the agent; the lowest wins.
func Score(a *Agent, image string) int {
	if _, ok := a.Images[image]; ok {
		return a.Allocated
	}
	return a.Allocated + MissingImage
}

// Choose returns the agent with the lowest score. Of equals the first wins, so that agents in the order of their uids give
// a deterministic choice. The counts of the verdict are complete only when nothing was chosen. It does not allocate.
func Choose(agents []*Agent, req *Request) Verdict {
	var v Verdict
	best := int(^uint(0) >> 1)
	for _, a := range agents {
		switch {
		case !a.Accepting || a.Heard < req.HeardSince:
			v.NotReady++
			continue
		case a.Allocated >= a.Capacity:
			v.Full++
			continue
		case a.Allocated >= best: // cannot win, whatever images it has
			continue
		case len(req.Exclude) > 0 && slices.Contains(req.Exclude, a.UID):
			v.Excluded++
			continue
		}
		if port, taken := conflict(a, req.Ports); taken {
			v.Conflicting++
			v.Port = port
			continue
		}
		if s := Score(a, req.Image); s < best {
			v.Chosen, best = a, s
			if s == 0 {
				return v
			}
		}
	}
	return v
}

func conflict(a *Agent, ports []int32) (int32, bool) {
	for _, p := range ports {
		if a.Ports[p] > 0 {
			return p, true
		}
	}
	return 0, false
}
