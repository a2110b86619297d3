// Package placement is the rule by which an agent is chosen for a sandbox (seed 001, section 3.2, extended by slots): filter
// by readiness, room, exclusion and ports, then the lowest score wins. It says what is right and not how it is found fast:
// Choose looks at every agent, and the registry's index, which does not, is tested against it. It keeps no state, does no
// I/O and takes no locks; everything in it may be called concurrently as long as nobody changes the arguments. Pure.
package placement

import (
	"math"
	"slices"
)

// Rank is the order of agents before images are looked at: those with a free slot first, then the least loaded.
type Rank uint32

const (
	slotless Rank = 1 << 31
	// MaxLoad is the largest load that a rank tells apart; more counts as that much.
	MaxLoad = int(slotless) - 2
	// Nowhere comes after the rank of every agent.
	Nowhere Rank = math.MaxUint32
)

// RankOf is the rank of an agent on which so many places are taken, and which has a free slot or not.
func RankOf(allocated int, slot bool) Rank {
	r := Rank(min(max(allocated, 0), MaxLoad))
	if !slot {
		r |= slotless
	}
	return r
}

// Load is the number of places that are taken.
func (r Rank) Load() int { return int(r &^ slotless) }

// Slot tells whether a slot is free.
func (r Rank) Slot() bool { return r&slotless == 0 }

// Score is the cost of placing a sandbox on an agent; the lowest wins. An image that has to be pulled costs more than any
// rank, a slot that is missing more than any load: image and slot, image, slot, neither, and among those the least loaded.
func Score(r Rank, cached bool) uint64 {
	if cached {
		return uint64(r)
	}
	return uint64(r) + 1<<32
}

// Agent is what placement needs to know of one agent.
type Agent struct {
	// UID of the agent's Pod.
	UID string
	// Ready tells whether the agent was heard of and takes new sandboxes.
	Ready bool
	// Capacity is the number of places, Allocated how many are taken.
	Capacity, Allocated int
	// FreeSlots is the number of slots that nobody has claimed or is about to.
	FreeSlots int
	// Images are the normalised references of the images on the agent's node.
	Images map[string]struct{}
	// Ports counts, for each TCP port, who has it: the agent itself and its sandboxes.
	Ports map[int32]int
}

// Score is the cost of placing a sandbox with the image on the agent.
func (a *Agent) Score(image string) uint64 {
	_, cached := a.Images[image]
	return Score(RankOf(a.Allocated, a.FreeSlots > 0), cached)
}

// Request is what a sandbox needs.
type Request struct {
	// Image is a normalised image reference.
	Image string
	// Ports that must be free.
	Ports []int32
	// Exclude holds uids of agents that must not be chosen.
	Exclude []string
}

// Verdict is the outcome of a choice, with the reasons why agents were passed over. Each agent counts once at most.
type Verdict struct {
	// Chosen is the best agent, nil if there is none.
	Chosen *Agent
	// NotReady, Full, Excluded and Conflicting count the agents that were passed over, each for the first that applies.
	NotReady, Full, Excluded, Conflicting int
	// Port is a port that is taken on a conflicting agent.
	Port int32
}

// Choose returns the agent with the lowest score, of equals the first.
func Choose(agents []*Agent, req *Request) Verdict {
	var v Verdict
	for _, a := range agents {
		switch {
		case !a.Ready:
			v.NotReady++
			continue
		case a.Allocated >= a.Capacity:
			v.Full++
			continue
		case slices.Contains(req.Exclude, a.UID):
			v.Excluded++
			continue
		}
		if port, taken := conflict(a, req.Ports); taken {
			v.Conflicting++
			v.Port = port
			continue
		}
		if v.Chosen == nil || a.Score(req.Image) < v.Chosen.Score(req.Image) {
			v.Chosen = a
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
