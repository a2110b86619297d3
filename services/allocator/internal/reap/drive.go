package reap

import (
	"context"
	"errors"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// Order says what to delete and how.
type Order struct {
	// Fence of the container.
	Fence *agentv1.Fence
	// Grace is the time between SIGTERM and SIGKILL; nil takes the sandbox's own.
	Grace *durationpb.Duration
	// Tombstone that the agent is to keep; nil for none.
	Tombstone *agentv1.Tombstone
}

// Drive is one deletion.
type Drive struct {
	reaper *Reaper
	key    identity.Fence
	done   chan struct{}

	// Guarded by Reaper.mu.
	order     Order
	accepted  chan struct{} // closed once the agent has taken the order, or there is no agent to take it
	taken     bool          // accepted is closed
	kept      bool          // the agent has the tombstone
	cancel    func()        // of the call that runs; nil if none does
	again     bool          // the call that runs was cut off for another
	unknown   bool          // an agent may have taken the order, and its answer was lost
	withdrawn bool
	err       error
}

// Done is closed once the container is certainly gone.
func (d *Drive) Done() <-chan struct{} { return d.done }

// Accepted is closed once the agent has taken the deletion, and has the tombstone durably, if there is one; or once the
// container is certainly gone.
func (d *Drive) Accepted() <-chan struct{} {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	return d.accepted
}

// Kept tells, after Accepted, whether an agent keeps the tombstone. None does if its Pod is gone, or the container was
// another's.
func (d *Drive) Kept() bool {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	return d.kept
}

// Err is why the last call failed; nil if none did.
func (d *Drive) Err() error {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	return d.err
}

// Withdraw gives the deletion up and returns true, if it is certain that no agent has heard of it.
func (d *Drive) Withdraw() bool {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	if d.taken || d.unknown || d.cancel != nil {
		return false
	}
	d.withdrawn = true
	if d.reaper.drives[d.key] == d {
		delete(d.reaper.drives, d.key)
	}
	return true
}

// join lays another order for the same container over this one. The lock is held.
func (d *Drive) join(o Order) {
	changed := false
	if o.Tombstone != nil && d.order.Tombstone == nil {
		d.order.Tombstone, changed = o.Tombstone, true
		if d.taken {
			d.accepted, d.taken = make(chan struct{}), false
		}
	}
	if o.Grace != nil && !proto.Equal(o.Grace, d.order.Grace) {
		d.order.Grace, changed = o.Grace, true
	}
	if changed && d.cancel != nil {
		d.again = true
		d.cancel()
	}
}

// begin notes a call and returns the order that it carries out; false if it was withdrawn.
func (d *Drive) begin(cancel context.CancelFunc) (Order, bool) {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	if d.withdrawn {
		return Order{}, false
	}
	d.cancel = cancel
	return d.order, true
}

// accept notes that the agent has taken an order.
func (d *Drive) accept(o Order) {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	if o.Tombstone != d.order.Tombstone { // a tombstone came after it
		return
	}
	d.kept = o.Tombstone != nil
	d.take()
}

// take closes accepted. The lock is held.
func (d *Drive) take() {
	if !d.taken {
		d.taken = true
		close(d.accepted)
	}
}

// complete ends an order whose container is gone, unless a tombstone came after it, which has to be kept all the same.
func (d *Drive) complete(o Order) error {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	if o.Tombstone != d.order.Tombstone {
		d.again = true
		return errors.New("a tombstone is still to be kept")
	}
	return nil
}

// failed notes why a call failed and tells whether the next has to come at once, or none at all.
func (d *Drive) failed(err error) (again, withdrawn bool) {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	again, d.again = d.again, false
	if d.cancel != nil && !refused(err) {
		d.unknown = true
	}
	if d.cancel = nil; !d.withdrawn {
		d.err = err
	}
	return again, d.withdrawn
}

// refused tells whether an agent has said that it did nothing.
func refused(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.Overloaded, fault.LeaderSuperseded, fault.InvalidField, fault.PermissionDenied:
		return true
	}
	return false
}

// settle notes that the container is gone; false if that is nobody's business any more.
func (d *Drive) settle() bool {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	d.cancel = nil
	if d.withdrawn {
		return false
	}
	d.take()
	return true
}

// end ends the drive, and whatever joined it since it was settled.
func (d *Drive) end() {
	d.reaper.mu.Lock()
	defer d.reaper.mu.Unlock()
	d.take()
	if d.reaper.drives[d.key] == d {
		delete(d.reaper.drives, d.key)
	}
	close(d.done)
}
