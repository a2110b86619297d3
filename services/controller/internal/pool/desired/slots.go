package desired

import (
	"fmt"
	"slices"
	"strings"
)

// SlotAgent is the last report of a serving agent on its slots.
type SlotAgent struct {
	// Free is the number of free slots; Wanted is how many the agent keeps free if it can.
	Free, Wanted int
	// OffReason is why it keeps none although the pool asks for slots; empty otherwise.
	OffReason string
	// Idle: none of its capacity is in use.
	Idle bool
}

// Slots summarizes the slots of a pool.
type Slots struct {
	// Free is the number of free slots.
	Free int
	// Ready: each agent that keeps slots has a free one.
	Ready bool
	// Reason explains Ready to programs, Message to people. They contain no number that changes with each create.
	Reason, Message string
}

// maxReasons bounds the number of reasons that a message lists.
const maxReasons = 3

// CountSlots summarizes the slots of a pool's agents. The reasons of the agents come first, because they need an action of the
// user.
func CountSlots(agents []SlotAgent) Slots {
	var out Slots
	var reasons []string
	off, unreported, empty := 0, 0, 0
	for _, a := range agents {
		out.Free += a.Free
		switch {
		case a.OffReason != "":
			off++
			reasons = append(reasons, a.OffReason)
		case a.Free > 0:
		case a.Wanted > 0:
			empty++
		case a.Idle: // all of its capacity is free, and it keeps no slots
			unreported++
		}
	}
	switch {
	case len(agents) == 0:
		out.Reason, out.Message = "AgentsNotReady", "no agent is ready"
	case off > 0:
		out.Reason, out.Message = "SlotsOff", fmt.Sprintf("%d of %d agents keep no slots: %s", off, len(agents), list(reasons))
	case unreported > 0:
		out.Reason, out.Message = "SlotsNotReported", "agents report no slots: their version may be older than slots"
	case empty > 0:
		out.Reason, out.Message = "SlotsRefilling", "agents have no free slot and are starting some"
	default:
		out.Ready, out.Reason = true, "SlotsFree"
	}
	return out
}

// list joins the distinct reasons in a stable order.
func list(reasons []string) string {
	slices.Sort(reasons)
	reasons = slices.Compact(reasons)
	if more := len(reasons) - maxReasons; more > 0 {
		reasons = append(reasons[:maxReasons:maxReasons], fmt.Sprintf("and %d more reasons", more))
	}
	return strings.Join(reasons, "; ")
}
