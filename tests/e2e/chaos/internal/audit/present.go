package audit

import (
	"slices"
	"time"
)

// The phases, and the agents' states, that an audit distinguishes.
const (
	phaseRunning, phaseExpired, phaseFailed = "Running", "Expired", "Failed"
	// StateCreating, StateRunning and StateTerminating are the states that agents report, without their prefix.
	StateCreating, StateRunning, StateTerminating = "CREATING", "RUNNING", "TERMINATING"
)

// present checks that an acknowledged sandbox is in its final state, and that nothing else of it exists.
func (a *auditor) present(l *life) {
	resources := a.resources[l.index]
	if len(resources) == 0 {
		if a.excused(l) {
			a.verdict.LostWithAgent = append(a.verdict.LostWithAgent, l.index)
		} else {
			a.violate(Lost, l, "it was acknowledged and has no custom resource")
		}
		for _, c := range a.containers[l.index] {
			a.stray(l, c, "without a custom resource")
		}
		return
	}
	r := resources[0]
	switch {
	case !slices.Contains(l.uids, r.UID):
		a.violate(Lost, l, "it was acknowledged as %v, and its custom resource is of %s", l.uids, r.UID)
		return
	case r.Deleting:
		a.violate(Lost, l, "its custom resource is being deleted, and no client asked for that")
		return
	}
	a.updates(l, r)
	runs := a.phase(l, r)
	for _, c := range a.containers[l.index] {
		current := c.UID == r.UID && c.Attempt == r.Attempt && c.AgentUID == r.AgentUID
		switch {
		case !a.obs.Agents[c.AgentUID]:
			a.stray(l, c, "though its agent does not")
		case !current || r.Phase == phaseExpired:
			a.stray(l, c, "beside the current one")
		}
	}
	if runs {
		a.running(l, r)
	}
	a.leftovers(l)
}

// phase checks the phase and reports whether the process must run.
func (a *auditor) phase(l *life, r Resource) bool {
	expires := !l.spec.ExpireTime.IsZero()
	late := expires && a.obs.At.After(l.spec.ExpireTime.Add(expiryMargin))
	switch {
	case r.Phase == phaseExpired:
		if !expires || a.obs.At.Before(l.spec.ExpireTime.Add(-time.Second)) {
			a.violate(Lost, l, "it is Expired before its expire time %v", l.spec.ExpireTime)
		}
	case r.Phase == phaseFailed:
		a.ended(l, r)
	case late:
		a.violate(Stuck, l, "it is %s %s after its expire time", r.Phase, a.obs.At.Sub(l.spec.ExpireTime))
	case r.Phase != phaseRunning:
		a.violate(Stuck, l, "its phase is %q", r.Phase)
	case r.AgentLost:
		a.lostAgent(l, r)
	case r.Finished:
		a.ended(l, r)
	case l.spec.Exit != nil:
		a.violate(Stuck, l, "its process should have ended with %d, and the custom resource does not say so", *l.spec.Exit)
	default:
		return true
	}
	return false
}

// ended checks a process that has ended by itself: with 0 its sandbox is Running and finished, otherwise Failed.
func (a *auditor) ended(l *life, r Resource) {
	switch {
	case a.lostRuntime(l, r):
		if l.recreates() {
			a.violate(Stuck, l, "its shim was killed and it was not recreated")
		}
	case l.spec.Exit == nil:
		a.violate(Lost, l, "its process should run and has ended, phase %s", r.Phase)
	case r.ExitCode == nil || *r.ExitCode != *l.spec.Exit:
		a.violate(Lost, l, "its process ended with %d, and the custom resource says %s", *l.spec.Exit, codeOf(r.ExitCode))
	case (*l.spec.Exit == 0) != (r.Phase == phaseRunning):
		a.violate(Stuck, l, "its process ended with %d, and its phase is %s", *l.spec.Exit, r.Phase)
	}
}

// lostRuntime reports whether the process of the current attempt has ended because its shim was killed.
func (a *auditor) lostRuntime(l *life, r Resource) bool {
	return r.Phase == phaseFailed && slices.ContainsFunc(a.containers[l.index], func(c Container) bool {
		return a.struck[c.ID] && c.UID == r.UID && c.Attempt == r.Attempt
	})
}

func (a *auditor) lostAgent(l *life, r Resource) {
	switch {
	case a.obs.Agents[r.AgentUID]:
		a.violate(Stuck, l, "AgentLost, and agent %s exists", r.AgentUID)
	case l.spec.AutoRecreate:
		a.violate(Stuck, l, "its agent %s is lost and it was not recreated", r.AgentUID)
	}
}

// running checks that exactly the container that the custom resource names runs, and that its agent reports it.
func (a *auditor) running(l *life, r Resource) {
	if !a.obs.Agents[r.AgentUID] {
		a.violate(Stuck, l, "it is Running on agent %s, which does not exist", r.AgentUID)
		return
	}
	var there bool
	for _, c := range a.containers[l.index] {
		if c.UID == r.UID && c.Attempt == r.Attempt && c.AgentUID == r.AgentUID {
			there = true
			if !c.Running {
				a.violate(Lost, l, "the task of its container %s does not run", c.ID)
			}
		}
	}
	if !there {
		a.violate(Lost, l, "it is Running and its container (attempt %d, agent %s) does not exist", r.Attempt, r.AgentUID)
		return
	}
	reported := false
	for _, p := range a.reports[l.index] {
		current := p.UID == r.UID && p.Attempt == r.Attempt && p.AgentUID == r.AgentUID
		reported = reported || current
		switch {
		case !current:
			a.violate(Leaked, l, "agent %s also reports attempt %d as %s", p.AgentUID, p.Attempt, p.State)
		case p.State != StateRunning:
			a.violate(Stuck, l, "it is Running and its agent reports %s", p.State)
		case !p.Persisted:
			a.violate(Stuck, l, "its agent has not learned that the custom resource is written")
		}
	}
	if !reported {
		a.violate(Lost, l, "it is Running and its agent %s does not report it", r.AgentUID)
	}
}

// updates checks that the last acknowledged change of each field is kept.
func (a *auditor) updates(l *life, r Resource) {
	if l.label != r.Label {
		a.violate(Lost, l, "the acknowledged label is %q, the custom resource has %q", l.label, r.Label)
	}
	if l.spec.AutoRecreate != r.AutoRecreate {
		a.violate(Lost, l, "the acknowledged failure policy is AutoRecreate=%t, the custom resource has %t", l.spec.AutoRecreate, r.AutoRecreate)
	}
	// The API server keeps whole seconds.
	if d := l.spec.ExpireTime.Sub(r.ExpireTime).Abs(); d > time.Second && (!l.spec.ExpireTime.IsZero() || !r.ExpireTime.IsZero()) {
		a.violate(Lost, l, "the acknowledged expire time is %v, the custom resource has %v", l.spec.ExpireTime, r.ExpireTime)
	}
	if !l.reset.IsZero() && r.Phase != phaseExpired && r.AcceptedReset.Before(l.reset.Truncate(time.Microsecond)) {
		a.violate(Stuck, l, "the reset of %v was acknowledged and not executed, the last one was %v", l.reset, r.AcceptedReset)
	}
}
