package deletion

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// Deletion is one deletion.
type Deletion struct {
	manager *Manager
	// removed is closed once the container is certainly gone.
	removed chan struct{}

	// Guarded by Manager.mu. request.Fence never changes.
	state    state.State
	request  Request
	revision int // of the request; each change makes the next
	accepted int // the last revision that the agent has accepted
	// kept: the agent has the tombstone.
	kept bool
	// calling: a goroutine calls the agent; cancel ends the call that runs, if one does, and outdated says that it was ended
	// for a newer revision.
	calling, outdated bool
	cancel            context.CancelFunc
	following         bool          // a goroutine carries the record half out
	changed           chan struct{} // closed, and replaced, at each change
	err               error         // why the last call failed

	// Set before the record half starts, and that half's own from then on.
	mayLand bool // a write of the custom resource may be on its way
	absent  bool // the API server had no custom resource when it was asked last, or none was ever written
	room    bool // it counts as a pending write
}

// Removed is closed once the container is certainly gone.
func (d *Deletion) Removed() <-chan struct{} { return d.removed }

// State returns where the deletion stands.
func (d *Deletion) State() state.State {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.state
}

// Err returns why the last call to the agent failed; nil if none did.
func (d *Deletion) Err() error {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.err
}

// apply lets an event change the state. The lock is held.
func (d *Deletion) apply(e state.Event) {
	d.state, _ = state.Next(d.state, e)
	d.notify()
}

// notify wakes all who wait for a change. The lock is held.
func (d *Deletion) notify() {
	close(d.changed)
	d.changed = make(chan struct{})
}

// learn lets an event change the state.
func (d *Deletion) learn(e state.Event) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	d.apply(e)
}

// merge takes what is new of another request for the same container, and reports whether anything is. The call that runs
// is ended, for the next one carries the new request. The lock is held.
func (d *Deletion) merge(r Request) bool {
	changed := false
	if r.Tombstone != nil && d.request.Tombstone == nil {
		d.request.Tombstone, changed = r.Tombstone, true
	}
	if r.Grace != nil && !proto.Equal(r.Grace, d.request.Grace) {
		d.request.Grace, changed = r.Grace, true
		if d.request.Tombstone != nil {
			d.request.Tombstone = proto.CloneOf(d.request.Tombstone)
			d.request.Tombstone.GracePeriod = r.Grace
		}
	}
	if d.request.Traceparent == "" {
		d.request.Traceparent = r.Traceparent
	}
	if !changed {
		return false
	}
	d.revision++
	if d.cancel != nil {
		d.outdated = true
		d.cancel()
	}
	return true
}

// current returns the request as it stands.
func (d *Deletion) current() Request {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.request
}

// beingCalled reports whether the agent is called until the container is gone.
func (d *Deletion) beingCalled() bool {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.calling
}

// begin notes a call and returns the request that it carries out; false if the deletion was withdrawn, or is over.
func (d *Deletion) begin(cancel context.CancelFunc) (r Request, revision int, ok bool) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	if d.state.Terminal() || d.state.ContainerRemoved() {
		return Request{}, 0, false
	}
	d.cancel = cancel
	d.apply(state.CallStarted)
	return d.request, d.revision, true
}

// accept notes that the agent carries out a revision of the request.
func (d *Deletion) accept(r Request, revision int) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	d.accepted = max(d.accepted, revision)
	d.kept = d.kept || r.Tombstone != nil
	d.apply(state.AgentAccepted)
}

// errUnkept is why a call is repeated after the container is gone.
var errUnkept = errors.New("a tombstone is still to be kept")

// finished returns an error if the call that reported the removal did not carry the tombstone that was asked for since.
func (d *Deletion) finished(r Request) error {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	if (r.Tombstone == nil) != (d.request.Tombstone == nil) {
		d.outdated = true
		return errUnkept
	}
	return nil
}

// failed notes why a call failed, and reports whether the next has to come at once, or none at all.
func (d *Deletion) failed(err error) (again, over bool) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	if d.cancel != nil {
		event := state.CallLost
		if refused(err) {
			event = state.CallRefused
		}
		d.apply(event)
	}
	again, d.outdated, d.cancel = d.outdated, false, nil
	over = d.state.Terminal() || d.state.ContainerRemoved()
	if !over {
		d.err = err
	}
	return again, over
}

// refused reports whether an agent has said that it did nothing.
func refused(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.Overloaded, fault.LeaderSuperseded, fault.InvalidField, fault.PermissionDenied:
		return true
	}
	return false
}

// Withdraw gives the deletion up and returns true, if it is certain that no agent has received it.
func (d *Deletion) Withdraw() bool {
	m := d.manager
	m.mu.Lock()
	defer m.mu.Unlock()
	next, ok := state.Next(d.state, state.Withdraw)
	if !ok {
		return false
	}
	d.state = next
	d.notify()
	if m.deletions[d.request.Fence] == d {
		delete(m.deletions, d.request.Fence)
	}
	return true
}

// progress returns whether the deletion is durable as it stands, and the channel that is closed when that may have changed: the
// agent has accepted this revision, or the container is gone, or no agent had to, for the custom resource is deleted.
func (d *Deletion) progress() (acknowledged bool, changed <-chan struct{}) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	durable := d.state.Acknowledged() && (d.accepted >= d.revision || d.accepted == 0)
	return durable || d.state.ContainerRemoved(), d.changed
}

// durable returns whether an acknowledged deletion survives this process, and the channel that is closed when that may have changed:
// an agent keeps the tombstone, or the record half has looked at the custom resource.
func (d *Deletion) durable() (durable bool, changed <-chan struct{}) {
	d.manager.mu.Lock()
	defer d.manager.mu.Unlock()
	return d.kept || d.state != state.Removed, d.changed
}

// nameOf returns the name of the sandbox that a tombstone is of.
func nameOf(t *agentv1.Tombstone) store.Key {
	return store.Key{Namespace: t.GetNamespace(), Name: t.GetName()}
}
