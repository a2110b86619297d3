package sandbox

import agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"

const (
	stateCreating    = agentv1.SandboxState_SANDBOX_STATE_CREATING
	stateRunning     = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stateStopped     = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	stateFailed      = agentv1.SandboxState_SANDBOX_STATE_FAILED
	stateTerminating = agentv1.SandboxState_SANDBOX_STATE_TERMINATING
	stateTerminated  = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

// event is what happens to a sandbox.
type event int

const (
	// eventStarted: the create has started the process.
	eventStarted event = iota + 1
	// eventFailed: the create has failed or was canceled; what it left is still to be removed.
	eventFailed
	// eventEnded: the process has ended and all its output is in its log.
	eventEnded
	// eventDelete: a delete was accepted.
	eventDelete
	// eventRemoved: nothing of the sandbox is left.
	eventRemoved
)

// next returns the state after an event. ok is false if the event cannot happen in the state, and then nothing changes.
func next(s agentv1.SandboxState, e event) (to agentv1.SandboxState, ok bool) {
	switch s {
	case stateCreating:
		switch e {
		case eventStarted:
			return stateRunning, true
		case eventFailed:
			return stateFailed, true
		case eventDelete:
			return stateTerminating, true
		case eventEnded, eventRemoved:
		}
	case stateRunning:
		switch e {
		case eventEnded:
			return stateStopped, true
		case eventDelete:
			return stateTerminating, true
		case eventStarted, eventFailed, eventRemoved:
		}
	case stateStopped:
		if e == eventDelete {
			return stateTerminating, true
		}
	case stateFailed:
		switch e {
		case eventDelete:
			return stateTerminating, true
		case eventRemoved:
			return stateTerminated, true
		case eventStarted, eventFailed, eventEnded:
		}
	case stateTerminating:
		switch e {
		case eventFailed, eventEnded, eventDelete:
			return stateTerminating, true
		case eventRemoved:
			return stateTerminated, true
		case eventStarted:
		}
	}
	return s, false
}
