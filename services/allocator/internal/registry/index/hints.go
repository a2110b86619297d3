package index

import (
	"slices"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/placement"
)

// A hint is what a dear search has found out: no offered agent below the floor has the image, if there is one, and all of
// the ports free. Ports cannot be skipped by summaries as images can, for what is asked is who is not in a set: a port that
// most agents have taken makes a search look at most words of most ranks. The next such search starts at the floor.
// Agents that come to fit below it lower it at once, so that hints are never wrong. There are few, and in most pools none.
type hint struct {
	image int32   // number of the image, noImage for any agent
	ports []int32 // numbers of the ports
	floor placement.Rank
}

const (
	noImage  = -1
	maxHints = 16
	// dear is the number of words from which on a search is worth a hint.
	dear = 512
)

// hint returns what is known about a search, nil if nothing is.
func (x *Index) hint(image int32, ports []int32) *hint {
	for i := range x.hints {
		if h := &x.hints[i]; h.image == image && slices.Equal(h.ports, ports) {
			return h
		}
	}
	return nil
}

// learn keeps what a search has found out, instead of something older if need be.
func (x *Index) learn(h *hint, image int32, ports []int32, floor placement.Rank) {
	if h == nil {
		if len(x.hints) < maxHints {
			x.hints = append(x.hints, hint{})
			h = &x.hints[len(x.hints)-1]
		} else {
			h = &x.hints[x.oldest]
			x.oldest = (x.oldest + 1) % maxHints
		}
		h.image, h.ports = image, append(h.ports[:0], ports...)
	}
	h.floor = floor
}

// unlearn corrects the hints by an agent that is offered at a lower rank, has another image, or has a port free.
func (x *Index) unlearn(id ID) {
	rank := x.members[id].rank
	for i := range x.hints {
		h := &x.hints[i]
		if rank < h.floor && (h.image == noImage || x.images.at[h.image].has(id)) && x.allFree(id, h.ports) {
			h.floor = rank
		}
	}
}

func (x *Index) allFree(id ID, ports []int32) bool {
	for _, p := range ports {
		if x.ports.at[p].has(id) {
			return false
		}
	}
	return true
}

// forget drops the hints that mention an image or a port (noImage for none) whose number may get another meaning.
func (x *Index) forget(image, port int32) {
	x.hints = slices.DeleteFunc(x.hints, func(h hint) bool {
		return image != noImage && h.image == image || port != noImage && slices.Contains(h.ports, port)
	})
	x.oldest = 0
}
