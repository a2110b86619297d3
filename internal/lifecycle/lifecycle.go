// Package lifecycle is the life of a sandbox (seed 002) as a pure state machine: what phase follows which event, and what
// has to be done about it. It knows neither Kubernetes nor agents, keeps nothing, and may be used from anywhere at once.
//
//	stateDiagram-v2
//	[*] --> Pending: ResetWhileLost
//	[*] --> Pending: RecoveryTimeoutOver (assigned)
//	[*] --> Pending: Accepted, AgentRefused, ResetRequested (not assigned)
//	[*] --> Bound: Scheduled, AgentCreating, AgentLost (assigned)
//	[*] --> Running: AgentRunning, AgentCompleted (assigned)
//	[*] --> Terminating: DeleteRequested (assigned)
//	[*] --> Expired: ExpireTimePassed (not assigned)
//	[*] --> Failed: AgentFailed
//	[*] --> Failed: AgentCrashed, AgentTerminated (assigned)
//	[*] --> [*]: DeleteRequested (not assigned)
//	Pending --> Bound: Scheduled, AgentCreating, AgentLost (assigned)
//	Pending --> Running: AgentRunning, AgentCompleted (assigned)
//	Pending --> Terminating: DeleteRequested (assigned)
//	Pending --> Expired: ExpireTimePassed (not assigned)
//	Pending --> Failed: AgentFailed
//	Pending --> Failed: AgentCrashed, AgentTerminated (assigned)
//	Pending --> [*]: DeleteRequested (not assigned)
//	Bound --> Pending: ResetWhileLost
//	Bound --> Pending: RecoveryTimeoutOver (assigned)
//	Bound --> Pending: Unassigned, AgentRefused, ResetRequested (not assigned)
//	Bound --> Running: AgentRunning, AgentCompleted (assigned)
//	Bound --> Terminating: DeleteRequested (assigned)
//	Bound --> Expired: ExpireTimePassed (not assigned)
//	Bound --> Failed: AgentFailed
//	Bound --> Failed: AgentCrashed, AgentTerminated (assigned)
//	Bound --> [*]: DeleteRequested (not assigned)
//	Running --> Pending: ResetWhileLost
//	Running --> Pending: RecoveryTimeoutOver (assigned)
//	Running --> Pending: Unassigned, ResetRequested (not assigned)
//	Running --> Terminating: DeleteRequested (assigned)
//	Running --> Expired: ExpireTimePassed (not assigned)
//	Running --> Failed: AgentCrashed, AgentFailed, AgentTerminated (assigned)
//	Running --> [*]: DeleteRequested (not assigned)
//	Terminating --> [*]: AgentTerminated
//	Terminating --> [*]: DeleteRequested (not assigned)
//	Expired --> Terminating: DeleteRequested (assigned)
//	Expired --> [*]: DeleteRequested (not assigned)
//	Failed --> Pending: ResetWhileLost
//	Failed --> Pending: ResetRequested (not assigned)
//	Failed --> Terminating: DeleteRequested (assigned)
//	Failed --> [*]: DeleteRequested (not assigned)
//
// assigned: while the sandbox has an assignment, so that a container of it may exist. A phase that an event does not leave
// is not drawn; of those events, AgentLost keeps the phase (the condition AgentLost tells), AgentCompleted keeps Running
// (the condition Finished tells), and a Failed sandbox that is still assigned is held for its logs (AgentCrashed) or
// cleaned up (AgentFailed -> Remove, AgentTerminated -> Release). Next has the actions.
//
// ExpireTimePassed, ResetRequested and AgentRefused are answered with Remove while the sandbox is assigned, and the phase
// stays: the event remains true, is raised again once the container is gone and the assignment is cleared, and moves the
// phase then. So no phase ever claims that a container is gone that may still exist, whenever the process that drives the
// machine dies.
package lifecycle

// Phase is where a sandbox is in its life. The values equal those of the custom resource.
type Phase string

// The phases of seed 002, and the two ends of a life that no custom resource shows.
const (
	// None is a sandbox that nobody has looked at yet.
	None Phase = ""
	// Pending waits for an agent.
	Pending Phase = "Pending"
	// Bound is assigned to an agent that was asked to create it.
	Bound Phase = "Bound"
	// Running is what its agent reports; also, with the condition Finished, after the process ended with code 0.
	Running Phase = "Running"
	// Terminating is being deleted until its agent says that it is gone.
	Terminating Phase = "Terminating"
	// Expired is past its expire time: container gone, record kept.
	Expired Phase = "Expired"
	// Failed could not be created, or its process ended with an error.
	Failed Phase = "Failed"
	// Gone is deleted: nothing is left but to let the record go.
	Gone Phase = "Gone"
)

// Phases lists every phase.
func Phases() []Phase {
	return []Phase{None, Pending, Bound, Running, Terminating, Expired, Failed, Gone}
}

// State is what Next decides on.
type State struct {
	// Phase is the phase.
	Phase Phase
	// Assigned tells that the sandbox has an assignment, so that a container of it may exist. It is true from before the
	// agent is first asked until after the agent said that the container is gone.
	Assigned bool
	// Finished tells that the process ended by itself with code 0. Such a sandbox is never run again by itself.
	Finished bool
}

// Event is something that was observed. Most are levels rather than edges: they are raised as long as they are true.
type Event int

// The events.
const (
	// Accepted: the record is seen for the first time, and is kept from vanishing.
	Accepted Event = iota + 1
	// Scheduled: an assignment is written.
	Scheduled
	// Unassigned: there is no assignment. In a phase that claims one, whoever took it away died before the phase followed.
	Unassigned
	// AgentCreating: the agent reports that it is at it.
	AgentCreating
	// AgentRefused: the agent cannot take the sandbox, through no fault of the request (full, port taken, unreachable).
	AgentRefused
	// AgentRunning: the agent reports a running process.
	AgentRunning
	// AgentCompleted: the process ended with code 0.
	AgentCompleted
	// AgentCrashed: the process ended with another code, or was killed.
	AgentCrashed
	// AgentFailed: the sandbox could not be created and never will be: the request is at fault.
	AgentFailed
	// AgentTerminated: the agent says that the container is gone, or the agent's Pod is.
	AgentTerminated
	// AgentLost: the agent cannot be reached or is gone, and the failure policy does not act (yet).
	AgentLost
	// RecoveryTimeoutOver: AgentLost has lasted for the recovery timeout, and the policy is AutoRecreate.
	RecoveryTimeoutOver
	// DeleteRequested: somebody deletes the record.
	DeleteRequested
	// ExpireTimePassed: the expire time is over.
	ExpireTimePassed
	// ResetRequested: the reset revision is later than the accepted one.
	ResetRequested
	// ResetWhileLost: the same, and the agent is lost, so that its word cannot be waited for.
	ResetWhileLost
)

// Events lists every event.
func Events() []Event {
	out := make([]Event, 0, int(ResetWhileLost))
	for e := Accepted; e <= ResetWhileLost; e++ {
		out = append(out, e)
	}
	return out
}

// String is the event's name.
func (e Event) String() string {
	switch e {
	case Accepted:
		return "Accepted"
	case Scheduled:
		return "Scheduled"
	case Unassigned:
		return "Unassigned"
	case AgentCreating:
		return "AgentCreating"
	case AgentRefused:
		return "AgentRefused"
	case AgentRunning:
		return "AgentRunning"
	case AgentCompleted:
		return "AgentCompleted"
	case AgentCrashed:
		return "AgentCrashed"
	case AgentFailed:
		return "AgentFailed"
	case AgentTerminated:
		return "AgentTerminated"
	case AgentLost:
		return "AgentLost"
	case RecoveryTimeoutOver:
		return "RecoveryTimeoutOver"
	case DeleteRequested:
		return "DeleteRequested"
	case ExpireTimePassed:
		return "ExpireTimePassed"
	case ResetRequested:
		return "ResetRequested"
	case ResetWhileLost:
		return "ResetWhileLost"
	default:
		return "Event(unknown)"
	}
}

// Action is what an event makes necessary. Every action may be repeated.
type Action string

// The actions.
const (
	// Allocate asks the allocator for a place and writes the assignment.
	Allocate Action = "Allocate"
	// Create asks the assigned agent for the container, unless the agent has it already.
	Create Action = "Create"
	// Remove asks the assigned agent to end the container, waits for its word, and then does what Release does.
	Remove Action = "Remove"
	// Release gives the place up and clears the assignment without the agent's word. The next attempt has another fence.
	Release Action = "Release"
	// RecordEnd keeps exit code and finish time, and sets the condition Finished.
	RecordEnd Action = "RecordEnd"
	// AcceptReset records the reset revision as acted on and forgets the last container's end.
	AcceptReset Action = "AcceptReset"
	// MarkLost sets the condition AgentLost.
	MarkLost Action = "MarkLost"
	// Finalize lets the record go.
	Finalize Action = "Finalize"
)
