// Package placement defines which agent is chosen for a sandbox (seed 001, section 3.2, extended by slots): agents are filtered
// by readiness, free capacity, exclusion and ports, then the lowest score wins. Choose is the reference implementation and
// examines every agent; the registry's index is fast and is tested against it. The package owns no state and does no I/O. Its
// functions may be called concurrently, as long as the arguments do not change. Pure.
package placement

import (
	"math"
	"slices"
)

// Rank orders agents before images are considered: agents with a free slot first, then the least loaded.
type Rank uint32

const (
	slotless Rank = 1 << 31
	// MaxLoad is the largest load of a rank. A larger load has the same rank.
	MaxLoad = int(slotless) - 2
	// Nowhere is greater than the rank of any agent.
	Nowhere Rank = math.MaxUint32
)

// RankOf returns the rank of an agent with the allocated capacity, with or without a free slot.
func RankOf(allocated int, slot bool) Rank {
	r := Rank(min(max(allocated, 0), MaxLoad))
	if !slot {
		r |= slotless
	}
	return r
}

// Load returns the allocated capacity.
func (r Rank) Load() int { return int(r &^ slotless) }

// Slot reports whether a slot is free.
func (r Rank) Slot() bool { return r&slotless == 0 }

// Score returns the cost of placing a sandbox on an agent; the lowest wins. A missing image costs more than any rank, and a
// missing slot more than any load. So the order is: image and slot, image, slot, neither; within each, the least loaded.
func Score(r Rank, cached bool) uint64 {
	if cached {
		return uint64(r)
	}
	return uint64(r) + 1<<32
}

// Agent is the part of an agent's state that placement depends on.
type Agent struct {
	// UID of the agent's Pod.
	UID string
	// Ready is set if the agent takes new sandboxes.
	Ready bool
	// Capacity is the number of sandboxes that the agent takes, Allocated how much of it is taken.
	Capacity, Allocated int
	// FreeSlots is the number of slots that no sandbox has claimed or is about to claim.
	FreeSlots int
	// Images are the normalized references of the images on the agent's node.
	Images map[string]struct{}
	// Ports counts the holders of each TCP port: the agent itself and its sandboxes.
	Ports map[int32]int
}

// Score returns the cost of placing a sandbox with the image on the agent.
func (a *Agent) Score(image string) uint64 {
	_, cached := a.Images[image]
	return Score(RankOf(a.Allocated, a.FreeSlots > 0), cached)
}

// Request is what a sandbox needs.
type Request struct {
	// Image is a normalized image reference.
	Image string
	// Ports that must be free.
	Ports []int32
	// Exclude holds uids of agents that must not be chosen.
	Exclude []string
}

// Verdict is the result of a choice, with the number of agents that were not eligible, by reason. Each agent counts at most
// once.
type Verdict struct {
	// Chosen is the best agent, nil if there is none.
	Chosen *Agent
	// NotReady, Full, Excluded and Conflicting count agents by the first of these reasons that applies.
	NotReady, Full, Excluded, Conflicting int
	// Port is a port that is taken on a conflicting agent.
	Port int32
}

// Choose returns the agent with the lowest score, the first of equal ones.
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
