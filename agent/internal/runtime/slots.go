package runtime

import (
	"context"
	"errors"
)

// Slots is what a Runtime has besides that can start containers ahead of time (DESIGN section 8): a slot is a container
// without an image whose first process waits to become a sandbox's. Until it is claimed it is nobody's; once it is, every
// call of Runtime takes it for the container that it was claimed for. Wait and Delete take slots, claimed or not.
type Slots interface {
	// Unsupported is nil if slots can be started and claimed here; else its text says why not. The answer does not change.
	Unsupported(ctx context.Context) error
	// StartSlot starts a slot and returns once it can be claimed. After an error some of it may be left: call Delete.
	StartSlot(ctx context.Context, s Slot) error
	// WarmSlot makes the root file system of an image ready in a free slot, so that a claim with that image is faster. The
	// image is not pulled for it: NotFound if it is not there. A claim that comes meanwhile waits for it; a slot that is claimed
	// already is left alone.
	WarmSlot(ctx context.Context, id, image string) error
	// Claim makes the slot of c's ID the container c, as Create and Start do of nothing: image, snapshot, durable record,
	// and then the process. reached is called from this goroutine after each stage. Errors are those of Create and Start,
	// and ErrSlotLost. After an error some of it may be left, and the slot is of no use any more: call Delete.
	Claim(ctx context.Context, c Container, reached func(Stage)) error
	// SlotClaimed is the last step of a claim, after which somebody may be told of the container: until it has returned, List
	// shows the container as Claiming, whoever lists. Safe to repeat.
	SlotClaimed(id string) error
}

// ErrSlotLost says that a slot did not take a claim, for no fault of the request, and that nothing of the request was run:
// it can be begun anew, with another slot or with none.
var ErrSlotLost = errors.New("the slot did not take the claim")

// Slot is a slot to start.
type Slot struct {
	// ID is unique on the node for all time.
	ID string
	// Labels of the container while it is a slot.
	Labels map[string]string
	// Group is the ID of the first of the slots that may share a helper process of the runtime's; the first's is its own.
	Group string
	// LogPath and HostnamePath as for a Container: they are the sandbox's after the claim. Their directory goes with Delete.
	LogPath, HostnamePath string
}
