package sandbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	// maxGraves bounds the tombstones that callers had the agent keep: in an outage of the API server of hours they
	// would fill the disk, and the snapshot.
	maxGraves  = 20000
	gravesWait = 5 * time.Second
)

// grave is a tombstone that a caller had the agent keep, the latest attempt of its sandbox: a later one covers the earlier.
//
//	           Delete                 written                 Forget            container gone, file removed
//	(nothing) --------> being written --------> reported ----------------> forgotten ----------> (nothing)
//	     ^                   | failed              ^                          |
//	     +-------------------+                     +-------- Delete ----------+
//
// What was forgotten while the container was still there keeps its file until that is gone, so that a crash in between
// does not bring the sandbox back. The manager's lock guards it.
type grave struct {
	// request is the delete that brought it; its file holds the same. nil while the first is being written.
	request *agentv1.DeleteSandboxRequest
	// busy is closed when the file is no longer being written or removed; nil while it is not.
	busy      chan struct{}
	forgotten bool
}

// attempt is the latest attempt that was deleted; 0 if none is durable.
func (g *grave) attempt() int64 { return g.request.GetFence().GetAttempt() }

// buried is the latest attempt of a sandbox that was deleted; 0 if none is known. mu is held.
func (m *Manager) buried(uid string) int64 {
	attempt, _ := m.tombstones.get(uid, m.clock.Now())
	if g := m.graves[uid]; g != nil {
		attempt = max(attempt, g.attempt())
	}
	return attempt
}

// loadGraves reads the tombstones of an earlier life. The files are whole, so that one that cannot be read is a fault of
// the disk: forgetting it could bring a deleted sandbox back, so it is an error.
func (m *Manager) loadGraves() error {
	names, err := m.config.Tombstones.Names()
	if err != nil {
		return fmt.Errorf("reading tombstones: %w", err)
	}
	for _, name := range names {
		raw, err := m.config.Tombstones.Read(name)
		if err != nil {
			return fmt.Errorf("reading tombstones: %w", err)
		}
		req := &agentv1.DeleteSandboxRequest{}
		if err := proto.Unmarshal(raw, req); err != nil {
			return fmt.Errorf("reading the tombstone of sandbox %s: %w", name, err)
		}
		if req.GetTombstone().GetFence().GetSandboxUid() != name || req.GetFence().GetSandboxUid() != name {
			return fmt.Errorf("reading the tombstone of sandbox %s: it is another's: %w", name, errdefs.ErrDataLoss)
		}
		m.graves[name] = &grave{request: req}
	}
	return nil
}

// reportedTombstones are all that are durable and not forgotten, in the order of their sandboxes. mu is held.
func (m *Manager) reportedTombstones() []*agentv1.Tombstone {
	var out []*agentv1.Tombstone
	for _, g := range m.graves {
		if g.request != nil && !g.forgotten {
			out = append(out, g.request.GetTombstone())
		}
	}
	slices.SortFunc(out, func(a, b *agentv1.Tombstone) int {
		return strings.Compare(a.GetFence().GetSandboxUid(), b.GetFence().GetSandboxUid())
	})
	return out
}

// bury makes the tombstone of a delete durable and reports it. mu is held, and released while the disk is written or
// another call writes it. After an error nothing is kept, or, where the disk is at fault, it may come back after a restart.
func (m *Manager) bury(ctx context.Context, req *agentv1.DeleteSandboxRequest) error {
	uid := req.GetFence().GetSandboxUid()
	if err := m.awaitGrave(ctx, uid); err != nil {
		return err
	}
	g := m.graves[uid]
	if g != nil && g.attempt() >= req.GetFence().GetAttempt() {
		if g.forgotten {
			g.forgotten = false
			m.publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{g.request.GetTombstone()}})
		}
		return nil
	}
	if g == nil {
		if len(m.graves) >= maxGraves {
			return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the agent keeps %d tombstones already", maxGraves).RetryIn(gravesWait)
		}
		g = &grave{}
		m.graves[uid] = g
	}
	req, _ = proto.Clone(req).(*agentv1.DeleteSandboxRequest)
	err := m.withGrave(g, func() error {
		raw, err := proto.Marshal(req)
		if err != nil {
			return err
		}
		return m.config.Tombstones.Write(uid, raw)
	})
	if err != nil {
		if g.request == nil {
			delete(m.graves, uid)
		}
		return errState(err)
	}
	delta := &agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{req.GetTombstone()}}
	if g.request != nil && !g.forgotten {
		delta.TombstonesRemoved = []*agentv1.Fence{g.request.GetFence()}
	}
	g.request, g.forgotten = req, false
	m.publish(delta)
	if m.closed { // the next life of the agent goes on with it
		return errClosing()
	}
	return nil
}

// ForgetTombstone drops a tombstone. One that is not there, or a later attempt has taken the place of, is forgotten already.
// It is no longer reported at once; its file stays until the container is gone. It blocks for the disk; safe to repeat.
func (m *Manager) ForgetTombstone(ctx context.Context, fence *agentv1.Fence) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	uid := fence.GetSandboxUid()
	if err := m.checkCall(ctx, fence); err != nil {
		return err
	}
	if err := m.awaitGrave(ctx, uid); err != nil {
		return err
	}
	g := m.graves[uid]
	if g == nil || g.attempt() != fence.GetAttempt() {
		return nil
	}
	m.tombstones.put(uid, fence.GetAttempt(), m.clock.Now()) // a create that is late is refused still
	if !g.forgotten {
		g.forgotten = true
		m.publish(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{g.request.GetFence()}})
	}
	return m.exhume(uid)
}

// exhume removes the file of a tombstone that was forgotten, if the container is gone. mu is held, and released for the
// disk; nobody is writing the file.
func (m *Manager) exhume(uid string) error {
	g := m.graves[uid]
	if g == nil || !g.forgotten {
		return nil
	}
	if e, ok := m.sandboxes[uid]; ok && e.record.GetFence().GetAttempt() <= g.attempt() {
		return nil
	}
	if err := m.withGrave(g, func() error { return m.config.Tombstones.Remove(uid) }); err != nil {
		return errState(err)
	}
	delete(m.graves, uid)
	return nil
}

// withGrave does I/O for a grave without the lock, which is held before and after.
func (m *Manager) withGrave(g *grave, do func() error) error {
	g.busy = make(chan struct{})
	m.mu.Unlock()
	err := do()
	m.mu.Lock()
	close(g.busy)
	g.busy = nil
	return err
}

// awaitGrave waits until nobody does I/O for the grave of a sandbox. mu is held before and after.
func (m *Manager) awaitGrave(ctx context.Context, uid string) error {
	for {
		g := m.graves[uid]
		if g == nil || g.busy == nil {
			return nil
		}
		busy := g.busy
		m.mu.Unlock()
		select {
		case <-busy:
		case <-ctx.Done():
		}
		m.mu.Lock()
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

// forget drops an entry of which nothing is left, after a tombstone that is just being written: watchers learn of that
// first. A tombstone that was forgotten goes with it.
func (m *Manager) forget(e *entry, log logr.Logger) {
	m.mu.Lock()
	defer m.mu.Unlock()
	uid := e.record.GetFence().GetSandboxUid()
	// The disk is waited for, whoever leaves: the context cannot end.
	_ = m.awaitGrave(context.Background(), uid)
	m.remove(e)
	if g := m.graves[uid]; g == nil || g.busy != nil {
		return
	}
	if err := m.exhume(uid); err != nil {
		log.Error(err, "removing a tombstone that was forgotten; the next life of the agent reports it again")
	}
}
