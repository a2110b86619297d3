package lifecycle

// Next returns the phase that follows event e in state s, and the actions to carry out, in their order. If the event has no
// meaning in the state, ok is false, the phase is s.Phase and there are no actions. Every value of s and e is allowed.
func Next(s State, e Event) (phase Phase, actions []Action, ok bool) {
	switch {
	case s.Phase == Gone:
		return Gone, nil, false
	case e == DeleteRequested:
		if s.Assigned {
			return Terminating, []Action{Remove}, true
		}
		return Gone, []Action{Finalize}, true
	case s.Phase == Terminating:
		if e == AgentTerminated {
			return Gone, []Action{Release, Finalize}, true
		}
		return Terminating, nil, false
	}
	switch e {
	case Accepted, Scheduled, Unassigned, AgentRefused:
		return nextPlacement(s, e)
	case AgentCreating, AgentRunning, AgentCompleted, AgentCrashed, AgentFailed, AgentTerminated:
		return nextReport(s, e)
	case AgentLost, RuntimeLost, RecoveryTimeoutOver:
		return nextLoss(s, e)
	case ExpireTimePassed:
		return nextExpire(s)
	case ResetRequested, ResetWhileLost:
		return nextReset(s, e)
	default:
		return s.Phase, nil, false
	}
}

// waiting reports whether the sandbox has not been observed to run yet.
func (s State) waiting() bool { return s.Phase == None || s.Phase == Pending || s.Phase == Bound }

func nextPlacement(s State, e Event) (Phase, []Action, bool) {
	if e == Unassigned && s.Phase == Running && !s.Assigned && !s.Finished {
		return Pending, []Action{Allocate}, true
	}
	if !s.waiting() {
		return s.Phase, nil, false
	}
	switch {
	case s.Assigned && e == Scheduled:
		return Bound, []Action{Create}, true
	case s.Assigned && e == AgentRefused:
		return s.Phase, []Action{Remove}, true
	case s.Assigned, e == Scheduled, e == Accepted && s.Phase != None, e == Unassigned && s.Phase == None:
		return s.Phase, nil, false
	default:
		return Pending, []Action{Allocate}, true
	}
}

// nextReport handles reports of the assigned agent. Without an assignment no agent can report on the sandbox.
func nextReport(s State, e Event) (Phase, []Action, bool) {
	if e == AgentFailed && s.waiting() && !s.Assigned { // refused before an agent was asked
		return Failed, nil, true
	}
	if !s.Assigned || s.Phase == Expired {
		return s.Phase, nil, false
	}
	switch {
	case e == AgentTerminated && s.Finished: // not requested, but the process had completed
		return s.Phase, []Action{Release}, true
	case e == AgentTerminated:
		return Failed, []Action{Release}, true
	case e == AgentFailed && !s.Finished:
		return Failed, []Action{Remove}, true
	case s.Phase == Failed, s.Finished && e != AgentCompleted: // an outdated report
		return s.Phase, nil, false
	case e == AgentCreating && s.Phase == Running: // outdated: a running process is not created again
		return s.Phase, nil, false
	case e == AgentCreating:
		return Bound, nil, true
	case e == AgentCrashed:
		return Failed, []Action{RecordEnd}, true
	case e == AgentCompleted:
		return Running, []Action{RecordEnd}, true
	default: // AgentRunning
		return Running, nil, true
	}
}

// nextLoss ignores the loss of the agent, or of the runtime, for a sandbox whose process has ended: recreating it would run it twice.
func nextLoss(s State, e Event) (Phase, []Action, bool) {
	if !s.Assigned || s.Finished || s.Phase == Expired || s.Phase == Failed {
		return s.Phase, nil, false
	}
	if e == AgentLost {
		if s.waiting() { // also None: on the fast path the container is created before the resource
			return Bound, []Action{MarkLost}, true
		}
		return s.Phase, []Action{MarkLost}, true
	}
	return Pending, []Action{Release, Allocate}, true
}

func nextExpire(s State) (Phase, []Action, bool) {
	switch {
	case s.Assigned:
		return s.Phase, []Action{Remove}, true
	case s.Phase == Expired, s.Phase == Failed: // the failure is worth more to the user than the expiry
		return s.Phase, nil, false
	default:
		return Expired, nil, true
	}
}

// nextReset ignores a reset of an Expired sandbox: in seed 002 only deletion leaves Expired.
func nextReset(s State, e Event) (Phase, []Action, bool) {
	switch {
	case s.Phase == Expired:
		return Expired, nil, false
	case s.Assigned && e == ResetWhileLost:
		return Pending, []Action{Release, AcceptReset, Allocate}, true
	case s.Assigned:
		return s.Phase, []Action{Remove}, true
	default:
		return Pending, []Action{AcceptReset, Allocate}, true
	}
}
