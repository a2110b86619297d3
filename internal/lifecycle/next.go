package lifecycle

// Next returns the phase that follows event e in state s and what is to be done, in that order. ok is false if the event
// means nothing in the state: the phase is then s.Phase and nothing is to be done. Pure; any values are allowed.
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
	case AgentLost, RecoveryTimeoutOver:
		return nextLoss(s, e)
	case ExpireTimePassed:
		return nextExpire(s)
	case ResetRequested, ResetWhileLost:
		return nextReset(s, e)
	default:
		return s.Phase, nil, false
	}
}

// waiting tells that the sandbox has not been seen to run.
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

// nextReport follows the assigned agent's word; without an assignment nobody may speak for the sandbox.
func nextReport(s State, e Event) (Phase, []Action, bool) {
	if e == AgentFailed && s.waiting() && !s.Assigned { // refused before there was an agent
		return Failed, nil, true
	}
	if !s.Assigned || s.Phase == Expired {
		return s.Phase, nil, false
	}
	switch {
	case e == AgentTerminated && s.Finished: // nobody asked for it, but all was done
		return s.Phase, []Action{Release}, true
	case e == AgentTerminated:
		return Failed, []Action{Release}, true
	case e == AgentFailed && !s.Finished:
		return Failed, []Action{Remove}, true
	case s.Phase == Failed, s.Finished && e != AgentCompleted: // an older word than the last one
		return s.Phase, nil, false
	case e == AgentCreating && s.Phase == Running: // a running process is not created again
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

// nextLoss lets nobody act for a sandbox that is done, however it ended: recreating it would run it twice.
func nextLoss(s State, e Event) (Phase, []Action, bool) {
	if !s.Assigned || s.Finished || s.Phase == Expired || s.Phase == Failed {
		return s.Phase, nil, false
	}
	if e == AgentLost {
		if s.waiting() { // one that was not even looked at, made on the fast path, is as bound as any
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
	case s.Phase == Expired, s.Phase == Failed: // how it failed is worth more than that it expired, too
		return s.Phase, nil, false
	default:
		return Expired, nil, true
	}
}

// nextReset leaves an Expired sandbox alone: its end was set beforehand, and seed 002 knows no way out of it but deletion.
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
