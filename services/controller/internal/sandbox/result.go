package sandbox

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

// result is what one step of a reconcile found or did, for the status and for the next reconcile. Steps return results, and
// merge combines them; no step reads the result of another one.
type result struct {
	// requeue is the time after which to reconcile again at the latest; zero: not needed.
	requeue time.Duration
	// cause explains the state of the sandbox. nil: as the steps before.
	cause *cause
	// unplaced is why no agent was found.
	unplaced *cause
	// blocked is why the sandbox cannot make progress although it should.
	blocked *cause
	// removing: the container is being removed, for a deletion, an expiry or a reset.
	removing bool
	// warned: an Event has reported the cause.
	warned bool
	// finalized: the finalizer is removed, so that there is no status to write.
	finalized bool
}

// cause is the reason of a condition and its message.
type cause struct{ reason, message string }

// merge returns the combination of r with the result of a later step.
func (r result) merge(later result) result {
	r.requeue = sooner(r.requeue, later.requeue)
	if later.cause != nil {
		r.cause = later.cause
	}
	if later.unplaced != nil {
		r.unplaced = later.unplaced
	}
	if later.blocked != nil {
		r.blocked = later.blocked
	}
	r.removing = r.removing || later.removing
	r.warned = r.warned || later.warned
	r.finalized = r.finalized || later.finalized
	return r
}

// sooner returns the shorter of two requeue times, of which zero means none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// after returns a requeue time of d, or the shortest one if d is not positive.
func after(d time.Duration) time.Duration { return max(d, time.Millisecond) }

// observation is what is true of a sandbox.
type observation struct {
	result

	// event is the most important event; zero: none.
	event lifecycle.Event
	// lost: the agent is lost.
	lost bool
}

// progress is what an action did.
type progress struct {
	result

	// done: the actions after it can be carried out. Otherwise the action waits, and is repeated by a later reconcile.
	done bool
	// next is the event that the action has led to; zero: observe again.
	next lifecycle.Event
}
