package sandbox

import (
	"context"
	"errors"
	"time"

	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Slots keeps containers that were started ahead of time; slot.Pool does. Its methods return at once, and call nothing of
// the Manager's.
type Slots interface {
	// SetPlaces says how many sandboxes the agent has room for.
	SetPlaces(n int)
	// Begin says that a create runs, which may take a slot, until done is called.
	Begin() (done func())
	// Take hands out a slot, the best one for the image; ok is false if there is none.
	Take(image string) (id string, ok bool)
	// Drop has slots removed that were taken and are of no use, or that an earlier life of the agent left.
	Drop(ids ...string)
}

// Claimer is what of runtime.Slots a create needs.
type Claimer interface {
	Claim(ctx context.Context, c runtime.Container, reached func(runtime.Stage)) error
	SlotClaimed(id string) error
}

// errNoSlot says that a create has to do without a slot.
var errNoSlot = errors.New("there is no slot for this sandbox")

// claim takes a slot and makes it the sandbox's container, and returns when its process was started. A slot that is lost
// costs the create some time and nothing else.
func (m *Manager) claim(ctx context.Context, e *entry, reached func(runtime.Stage)) (time.Time, error) {
	// A slot is in the agent's network.
	if m.config.Slots == nil || network(e.record) != runtime.NetworkAgent {
		return time.Time{}, errNoSlot
	}
	image, err := runtime.NormalizeImage(e.record.GetSpec().GetImage())
	if err != nil {
		return time.Time{}, err
	}
	id, ok := m.config.Slots.Take(image)
	if !ok {
		return time.Time{}, errNoSlot
	}
	own := e.id
	m.rename(e, id, true)
	paths, err := m.config.Logs.Paths(id)
	if err != nil {
		return time.Time{}, err
	}
	c, err := m.container(e, paths)
	if err != nil {
		return time.Time{}, err
	}
	started := m.clock.Now()
	err = m.config.Claimer.Claim(ctx, c, reached)
	if errors.Is(err, runtime.ErrSlotLost) && ctx.Err() == nil {
		logr.FromContextOrDiscard(ctx).Info("a slot did not take its claim; going on without", "container", id, "err", err.Error())
		m.rename(e, own, false)
		m.config.Slots.Drop(id)
		return time.Time{}, errNoSlot
	}
	if err != nil {
		return time.Time{}, err
	}
	if err := m.config.Logs.MarkStarted(id, started); err != nil {
		return time.Time{}, err
	}
	return started, m.config.Claimer.SlotClaimed(id)
}

// rename gives an entry another container before anybody was told of the first.
func (m *Manager) rename(e *entry, id string, madeLog bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.id, e.madeLog = id, madeLog
}

// tellPlaces tells how many slots are of use. mu is held.
func (m *Manager) tellPlaces() {
	if m.config.Slots == nil {
		return
	}
	n := int(m.config.Info.GetCapacity()) - len(m.sandboxes)
	if !m.adopted || m.draining || m.closed {
		n = 0
	}
	m.config.Slots.SetPlaces(n)
}

// SetSlots says how many slots there are, and tells watchers if that changed.
func (m *Manager) SetSlots(s *agentv1.SlotStatus) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !proto.Equal(m.slots, s) {
		m.slots = s
		m.publish(&agentv1.AgentDelta{Slots: s})
	}
}
