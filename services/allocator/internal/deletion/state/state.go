// Package state is the life of one deletion as a pure state machine: which state follows which event. It keeps nothing and
// may be used from anywhere at once; package deletion carries out what each state asks for.
//
// A deletion has two halves: its container is deleted by the agent, and its record (the custom resource, and the tombstone
// on the agent that makes the deletion durable without it) by this process. The first row is before an agent has
// acknowledged the deletion; then each column is what is known of the record, each row of the container.
//
//	            CallStarted            CallLost                CallStarted
//	Queued <----------------> Calling -----------> Uncertain <--------------> Repeating
//	  |      CallRefused                                 CallLost, CallRefused
//	  | Withdraw         | AgentAccepted from Calling and Repeating; from any of the four ResourceDeleted leads
//	  v                  | to Settled, and ContainerRemoved to Removed
//	Withdrawn            v
//	              Accepted --ResourceAbsent--> Absent --ResourceDeleted--> Settled
//	                 |  \------------ResourceDeleted----------------------->  |
//	                 | ContainerRemoved          | ContainerRemoved           | ContainerRemoved
//	                 v                           v                            v
//	              Removed --ResourceAbsent--> Settling --ResourceDeleted--> Dropping --TombstoneDropped--> Confirming
//	                 |  \------------ResourceDeleted----------------------->  ^                               |
//	                 | Unrecorded                | SettleTimePassed           |                               | Confirmed
//	                 v                           v  ResourceDeleted or        |                               v
//	                Done                     Rechecking -- ResourceAbsent ----/                              Done
//
// ResourceAbsent leaves open that a write of the custom resource, sent before, lands later: hence the settle time and the
// second look. ResourceDeleted says that no write can land: the resource was there and is deleted, or no process ever sent
// one. A deletion that has no record, for instance of a leftover container, is Unrecorded: it is done when the container is
// removed.
package state

// State is where a deletion stands.
type State int

// The states.
const (
	// Queued: neither an agent nor the API server has received the deletion; it may be withdrawn.
	Queued State = iota
	// Calling: the first call to the agent runs and is not acknowledged.
	Calling
	// Uncertain: a call ended without an answer; the agent may carry the deletion out.
	Uncertain
	// Repeating: a further call runs.
	Repeating
	// Accepted: the agent carries the deletion out, and keeps its tombstone if it has one. The record was not looked at.
	Accepted
	// Absent: the agent carries it out, and the API server has no custom resource, but one may still be written.
	Absent
	// Settled: the agent carries it out, and no custom resource stays or comes.
	Settled
	// Removed: the container is gone. The record was not looked at.
	Removed
	// Settling: the container is gone; a write that was sent may still land.
	Settling
	// Rechecking: the container is gone, and no write can land any longer; one may have landed.
	Rechecking
	// Dropping: nothing is left but the agent's tombstone, which the agent has to drop.
	Dropping
	// Confirming: the tombstone is dropped; the agent or the API server may still report the sandbox.
	Confirming
	// Done: nothing is left.
	Done
	// Withdrawn: it never began.
	Withdrawn
)

// Event is what a deletion learns.
type Event int

// The events.
const (
	// CallStarted: a call to the agent begins.
	CallStarted Event = iota
	// CallRefused: the call ended, and the agent said that it did nothing.
	CallRefused
	// CallLost: the call ended, and what the agent did is not known.
	CallLost
	// AgentAccepted: the agent carries the deletion out, durably if it has a tombstone.
	AgentAccepted
	// ContainerRemoved: the container is certainly gone.
	ContainerRemoved
	// ResourceAbsent: the API server has no custom resource of the sandbox; a write may still land.
	ResourceAbsent
	// ResourceDeleted: the custom resource is deleted or being deleted, and no write can land.
	ResourceDeleted
	// SettleTimePassed: every write that was sent has landed or failed.
	SettleTimePassed
	// TombstoneDropped: the agent has no tombstone of the container.
	TombstoneDropped
	// Confirmed: neither the agent nor the API server reports the sandbox.
	Confirmed
	// Unrecorded: the deletion has neither a tombstone nor a custom resource to look after.
	Unrecorded
	// Withdraw: the caller takes the deletion back.
	Withdraw
)

// transitions has, for each state, the events that mean something in it.
var transitions = map[State]map[Event]State{ //nolint:gochecknoglobals // a constant table
	Queued: {CallStarted: Calling, ContainerRemoved: Removed, ResourceDeleted: Settled, Withdraw: Withdrawn},
	Calling: {
		CallRefused: Queued, CallLost: Uncertain, AgentAccepted: Accepted, ContainerRemoved: Removed, ResourceDeleted: Settled,
	},
	Uncertain: {CallStarted: Repeating, ContainerRemoved: Removed, ResourceDeleted: Settled},
	Repeating: {
		CallRefused: Uncertain, CallLost: Uncertain, AgentAccepted: Accepted, ContainerRemoved: Removed, ResourceDeleted: Settled,
	},
	Accepted:   {ContainerRemoved: Removed, ResourceAbsent: Absent, ResourceDeleted: Settled},
	Absent:     {ContainerRemoved: Settling, ResourceDeleted: Settled},
	Settled:    {ContainerRemoved: Dropping},
	Removed:    {ResourceAbsent: Settling, ResourceDeleted: Dropping, Unrecorded: Done},
	Settling:   {ResourceDeleted: Dropping, SettleTimePassed: Rechecking},
	Rechecking: {ResourceAbsent: Dropping, ResourceDeleted: Dropping},
	Dropping:   {TombstoneDropped: Confirming},
	Confirming: {Confirmed: Done},
	Done:       {},
	Withdrawn:  {},
}

// Next returns the state that follows, and whether the event means anything in the state that is; if not, the state stays.
func Next(s State, e Event) (State, bool) {
	if next, ok := transitions[s][e]; ok {
		return next, true
	}
	return s, false
}

// Acknowledged reports whether an agent has accepted the deletion, or its container is gone.
func (s State) Acknowledged() bool { return s >= Accepted && s != Withdrawn }

// ContainerRemoved reports whether the container is certainly gone.
func (s State) ContainerRemoved() bool { return s >= Removed && s != Withdrawn }

// Terminal reports whether nothing follows.
func (s State) Terminal() bool { return s == Done || s == Withdrawn }

// String returns the state's name.
func (s State) String() string {
	names := [...]string{
		"Queued", "Calling", "Uncertain", "Repeating", "Accepted", "Absent", "Settled", "Removed", "Settling", "Rechecking",
		"Dropping", "Confirming", "Done", "Withdrawn",
	}
	if s < 0 || int(s) >= len(names) {
		return "Unknown"
	}
	return names[s]
}

// String returns the event's name.
func (e Event) String() string {
	names := [...]string{
		"CallStarted", "CallRefused", "CallLost", "AgentAccepted", "ContainerRemoved", "ResourceAbsent", "ResourceDeleted",
		"SettleTimePassed", "TombstoneDropped", "Confirmed", "Unrecorded", "Withdraw",
	}
	if e < 0 || int(e) >= len(names) {
		return "Unknown"
	}
	return names[e]
}
