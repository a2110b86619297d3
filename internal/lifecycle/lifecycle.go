// Package lifecycle is the lifecycle of a sandbox (seed 002) as a pure state machine: Next returns the phase that follows an
// event, and the actions to carry out. It does not depend on Kubernetes or on agents, has no state, and may be called
// concurrently.
//
//	stateDiagram-v2
//	[*] --> Pending: ResetWhileLost
//	[*] --> Pending: RuntimeLost, RecoveryTimeoutOver (assigned)
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
//	Bound --> Pending: RuntimeLost, RecoveryTimeoutOver (assigned)
//	Bound --> Pending: Unassigned, AgentRefused, ResetRequested (not assigned)
//	Bound --> Running: AgentRunning, AgentCompleted (assigned)
//	Bound --> Terminating: DeleteRequested (assigned)
//	Bound --> Expired: ExpireTimePassed (not assigned)
//	Bound --> Failed: AgentFailed
//	Bound --> Failed: AgentCrashed, AgentTerminated (assigned)
//	Bound --> [*]: DeleteRequested (not assigned)
//	Running --> Pending: ResetWhileLost
//	Running --> Pending: RuntimeLost, RecoveryTimeoutOver (assigned)
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
// "(assigned)" means that the sandbox has an assignment, so that its container may exist. Events that keep the phase are not
// shown: AgentLost sets the condition AgentLost, AgentCompleted sets the condition Finished on a Running sandbox, and a Failed
// sandbox that is still assigned keeps its container for the logs (AgentCrashed) or is cleaned up (AgentFailed -> Remove,
// AgentTerminated -> Release). Next returns the actions.
//
// While the sandbox is assigned, the answer to ExpireTimePassed, ResetRequested and AgentRefused is Remove, and the phase does
// not change. The event is raised again after the container is removed and the assignment is cleared, and changes the phase
// then. So a phase never says that a container is gone while it may exist, even if the controller dies at any point.
package lifecycle

// Phase is the phase of a sandbox. The values are those of the custom resource.
type Phase string

// The phases of seed 002, and None and Gone, which no custom resource has.
const (
	// None: the controller has not processed the sandbox yet.
	None Phase = ""
	// Pending: waits to be placed on an agent.
	Pending Phase = "Pending"
	// Bound: assigned to an agent, which creates the container.
	Bound Phase = "Bound"
	// Running: the agent reports that the process runs or, with the condition Finished, that it ended with code 0.
	Running Phase = "Running"
	// Terminating: deleted, but the agent has not reported yet that the container is removed.
	Terminating Phase = "Terminating"
	// Expired: past its expire time. The container is removed, the record is kept.
	Expired Phase = "Expired"
	// Failed: the container could not be created, or its process ended with an error.
	Failed Phase = "Failed"
	// Gone: deleted. Only the finalizer of the record is left to be removed.
	Gone Phase = "Gone"
)

// Phases lists every phase.
func Phases() []Phase {
	return []Phase{None, Pending, Bound, Running, Terminating, Expired, Failed, Gone}
}

// Reasons of a process that has ended, as agents report them.
const (
	ReasonCompleted = "Completed"
	ReasonError     = "Error"
	ReasonOOMKilled = "OOMKilled"
	// ReasonRuntimeLost: what ran the process on the node has ended, and the process with it.
	ReasonRuntimeLost = "RuntimeLost"
)

// State is the state on which Next decides.
type State struct {
	// Phase is the phase.
	Phase Phase
	// Assigned: the sandbox has an assignment, so that its container may exist. It is set before the agent is asked for the
	// container, and cleared after the agent has reported its removal.
	Assigned bool
	// Finished: the process ended with code 0. Such a sandbox is started again only by a reset.
	Finished bool
}

// Event is an observation. Most events are levels: they are raised as long as they are true.
type Event int

// The events.
const (
	// Accepted: the record is processed for the first time, and has its finalizer.
	Accepted Event = iota + 1
	// Scheduled: an assignment is written.
	Scheduled
	// Unassigned: there is no assignment. In a phase that implies one, the controller died after it cleared the assignment and
	// before it changed the phase.
	Unassigned
	// AgentCreating: the agent reports that it creates the container.
	AgentCreating
	// AgentRefused: the agent cannot run the sandbox, for a reason that is not in the request (no capacity, port conflict,
	// unreachable).
	AgentRefused
	// AgentRunning: the agent reports a running process.
	AgentRunning
	// AgentCompleted: the process ended with code 0.
	AgentCompleted
	// AgentCrashed: the process ended with another code or by a signal.
	AgentCrashed
	// RuntimeLost: the process ended because what ran it on the node did, and the failure policy is AutoRecreate. With another policy, that is
	// AgentCrashed.
	RuntimeLost
	// AgentFailed: the container cannot be created by any agent: the request is invalid.
	AgentFailed
	// AgentTerminated: the agent reports that the container is removed, or the agent's Pod does not exist.
	AgentTerminated
	// AgentLost: the agent is unreachable or its Pod does not exist, and the failure policy does not act (yet).
	AgentLost
	// RecoveryTimeoutOver: AgentLost has lasted for the recovery timeout, and the failure policy is AutoRecreate.
	RecoveryTimeoutOver
	// DeleteRequested: the record is being deleted.
	DeleteRequested
	// ExpireTimePassed: the expire time has passed.
	ExpireTimePassed
	// ResetRequested: the reset revision is later than the accepted one.
	ResetRequested
	// ResetWhileLost: like ResetRequested, but the agent is lost, so that its report cannot be waited for.
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

// String returns the name of the event.
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
	case RuntimeLost:
		return "RuntimeLost"
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

// Action is a step that an event requires. Every action is idempotent.
type Action string

// The actions.
const (
	// Allocate reserves capacity at the allocator and writes the assignment.
	Allocate Action = "Allocate"
	// Create asks the assigned agent for the container, unless the agent has it already.
	Create Action = "Create"
	// Remove asks the assigned agent to remove the container, waits for its report, and then does what Release does.
	Remove Action = "Remove"
	// Release gives up the reservation and clears the assignment without waiting for the agent. The next attempt has another
	// fence.
	Release Action = "Release"
	// RecordEnd records exit code and finish time, and sets the condition Finished.
	RecordEnd Action = "RecordEnd"
	// AcceptReset records that the reset revision is carried out, and clears exit code and finish time.
	AcceptReset Action = "AcceptReset"
	// MarkLost sets the condition AgentLost.
	MarkLost Action = "MarkLost"
	// Finalize removes the finalizer of the record.
	Finalize Action = "Finalize"
)
