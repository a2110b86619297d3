package runtime

import (
	"context"
	"errors"
)

// Slots is implemented by a Runtime that can start containers ahead of time. A slot is a container without an image whose
// first process waits to become a sandbox's. Once it is claimed, every method of Runtime treats it as the container that it
// was claimed for. Wait and Delete also take slots that are not claimed.
type Slots interface {
	// Unsupported returns nil if slots can be started and claimed here, otherwise why not. The answer does not change.
	Unsupported(ctx context.Context) error
	// StartSlot starts a slot and returns once it can be claimed. After an error some of it may be left, and the caller calls
	// Delete.
	StartSlot(ctx context.Context, s Slot) error
	// WarmSlot prepares the root file system of an image in a free slot, so that a claim with that image is faster. The image
	// is not pulled: NotFound if it is not on the node. A claim that comes meanwhile waits; a slot that is claimed already is
	// left alone.
	WarmSlot(ctx context.Context, id, image string) error
	// Claim turns the slot with c's ID into the container c: image, snapshot, durable record, and then the process. reached is
	// called from this goroutine after each stage. The errors are those of Create and Start, and ErrSlotLost. After an error
	// some of it may be left, the slot cannot be used again, and the caller calls Delete.
	Claim(ctx context.Context, c Container, reached func(Stage)) error
	// SlotClaimed completes a claim. Until it has returned, the container must not be acknowledged, and List reports it as
	// Claiming. Safe to repeat.
	SlotClaimed(id string) error
}

// ErrSlotLost means that a slot did not take a claim, that the request is not at fault, and that nothing of it was run: it
// can be repeated with another slot or without one.
var ErrSlotLost = errors.New("slot lost before it took the claim")

// Slot is a slot to start.
type Slot struct {
	// ID is unique on the node and never used again.
	ID string
	// Labels of the container while it is a slot.
	Labels map[string]string
	// Group is the ID of the first of the slots that may share a helper process of the runtime; the first slot's is its own. A slot
	// whose group has ended gets a helper process of its own.
	Group string
	// LogPath and HostnamePath are as for a Container, and the sandbox's after the claim. Delete removes their directory.
	LogPath, HostnamePath string
}
