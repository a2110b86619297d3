package desired

import (
	"fmt"
	"slices"
	"strings"
)

// SlotAgent is an agent that serves, and its own last word on its slots.
type SlotAgent struct {
	// Free slots are started and not claimed; Wanted is how many it means to keep.
	Free, Wanted int
	// OffReason is why it keeps none although the pool wants some; empty otherwise.
	OffReason string
	// Idle tells that no place on it is taken.
	Idle bool
}

// Slots is how a pool that wants slots is off for them.
type Slots struct {
	// Free is the number of slots that are started and not claimed.
	Free int
	// Ready tells that each agent that means to keep slots has one free.
	Ready bool
	// Reason is a word on Ready for machines; Message a sentence for people, empty while it is. They hold no number that
	// changes with each create.
	Reason, Message string
}

// maxReasons bounds how many agents' reasons a message lists.
const maxReasons = 3

// CountSlots sums up the slots of a pool's agents. The agents' own reasons come first: nothing but a person's deed changes
// those.
func CountSlots(agents []SlotAgent) Slots {
	var out Slots
	var reasons []string
	off, silent, empty := 0, 0, 0
	for _, a := range agents {
		out.Free += a.Free
		switch {
		case a.OffReason != "":
			off++
			reasons = append(reasons, a.OffReason)
		case a.Free > 0:
		case a.Wanted > 0:
			empty++
		case a.Idle: // all its places are free, and it means to keep no slot in any
			silent++
		}
	}
	switch {
	case len(agents) == 0:
		out.Reason, out.Message = "AgentsNotReady", "no agent is ready"
	case off > 0:
		out.Reason, out.Message = "SlotsOff", fmt.Sprintf("%d of %d agents keep no slots: %s", off, len(agents), list(reasons))
	case silent > 0:
		out.Reason, out.Message = "SlotsNotReported", "agents tell of no slots: their image may be older than slots are"
	case empty > 0:
		out.Reason, out.Message = "SlotsRefilling", "agents have no slot free and are starting some"
	default:
		out.Ready, out.Reason = true, "SlotsFree"
	}
	return out
}

// list joins different reasons, in an order that does not change by itself.
func list(reasons []string) string {
	slices.Sort(reasons)
	reasons = slices.Compact(reasons)
	if more := len(reasons) - maxReasons; more > 0 {
		reasons = append(reasons[:maxReasons:maxReasons], fmt.Sprintf("and %d more reasons", more))
	}
	return strings.Join(reasons, "; ")
}
