package fake

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
)

// The calls of slots.
const (
	OpSlot    Op = "slot"
	OpWarm    Op = "warm"
	OpClaim   Op = "claim"   // before anything is done
	OpGo      Op = "go"      // after the claim is recorded
	OpClaimed Op = "claimed" // after the process was started
)

var _ runtime.Slots = (*Runtime)(nil)

// Unsupported is nil.
func (r *Runtime) Unsupported(context.Context) error { return nil }

// StartSlot adds a slot that waits.
func (r *Runtime) StartSlot(ctx context.Context, s runtime.Slot) error {
	if err := r.enter(ctx, OpSlot, s.ID); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.containers[s.ID] = &container{slot: true, spec: runtime.Container{LogPath: s.LogPath}, ended: make(chan struct{}), found: runtime.Found{
		ID: s.ID, Labels: maps.Clone(s.Labels), CreatedAt: time.Now(), Task: runtime.TaskRunning,
	}}
	return nil
}

// WarmSlot checks that the image is local.
func (r *Runtime) WarmSlot(ctx context.Context, id, image string) error {
	name, err := runtime.NormalizeImage(image)
	if err != nil {
		return err
	}
	if err := r.enter(ctx, OpWarm, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.images[name].Local {
		return fmt.Errorf("image %s: %w", name, errdefs.ErrNotFound)
	}
	return nil
}

// Claim turns a slot into a container and starts it.
func (r *Runtime) Claim(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error {
	r.mu.Lock()
	slot := r.containers[c.ID]
	lost := slot == nil || !slot.slot || slot.found.Task != runtime.TaskRunning
	if !lost {
		slot.slot = false
	}
	r.mu.Unlock()
	if lost {
		return fmt.Errorf("slot %s: %w", c.ID, runtime.ErrSlotLost)
	}
	err := r.claim(ctx, slot, c, reached)
	if err != nil {
		r.mu.Lock()
		slot.end(runtime.Exit{Code: 125})
		r.mu.Unlock()
	}
	return err
}

func (r *Runtime) claim(ctx context.Context, slot *container, c runtime.Container, reached func(runtime.Stage)) error {
	if err := r.enter(ctx, OpClaim, c.ID); err != nil {
		return err
	}
	if err := r.ensure(ctx, c); err != nil {
		return err
	}
	reached(runtime.StageImage)
	if err := r.checkUser(c); err != nil {
		return err
	}
	reached(runtime.StageSnapshot)
	r.mu.Lock()
	slot.spec, slot.found.Labels, slot.found.Record, slot.found.Claiming = c, maps.Clone(c.Labels), c.Record, true
	r.mu.Unlock()
	reached(runtime.StageContainer)
	if err := check(c); err != nil {
		return err
	}
	reached(runtime.StageClaim)
	if err := r.enter(ctx, OpGo, c.ID); err != nil {
		return err
	}
	return r.Start(ctx, c.ID)
}

// SlotClaimed completes a claim.
func (r *Runtime) SlotClaimed(id string) error {
	if err := r.enter(context.Background(), OpClaimed, id); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		c.found.Claiming = false
	}
	return nil
}
