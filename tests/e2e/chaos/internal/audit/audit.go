package audit

import (
	"fmt"
	"slices"
	"time"
)

// expiryMargin is the time after its expire time within which a sandbox must become Expired.
const expiryMargin = 15 * time.Second

// auditor holds the observations grouped by life.
type auditor struct {
	obs    Observations
	killed map[string]string // uid of an agent Pod that was killed -> its name
	struck map[string]bool   // containers whose shim was killed
	lives  []*life
	// The observations of each life; -1 has those that belong to no request.
	resources  map[int][]Resource
	reports    map[int][]Report
	containers map[int][]Container
	remnants   map[int][]Remnant
	tombstones map[int][]Tombstone
	verdict    Verdict
}

// Audit judges. calls is the whole log, strikes all faults of the run.
func Audit(calls []Call, strikes []Strike, obs Observations) Verdict {
	a := &auditor{obs: obs, killed: map[string]string{}, struck: map[string]bool{}, lives: livesOf(calls)}
	for _, s := range strikes {
		for _, id := range s.Containers {
			a.struck[id] = true
		}
		if s.AgentUID != "" {
			a.killed[s.AgentUID] = s.AgentPod
		}
	}
	a.sort()
	for _, l := range a.lives {
		a.answers(l)
		a.duplicates(l)
		switch l.want {
		case expectAbsent:
			a.absent(l)
		case expectPresent:
			a.present(l)
		case expectUnknown:
		}
	}
	a.unowned()
	a.counts()
	for _, name := range a.obs.Garbage {
		a.violateObject(Leaked, name, "its owner was deleted and the garbage collector has not deleted it")
	}
	return a.verdict
}

// sort finds the life of each observation: by request id, or by uid where there is no request id.
func (a *auditor) sort() {
	byRequest, byUID := map[string]int{}, map[string]int{}
	for _, l := range a.lives {
		byRequest[l.requestID] = l.index
		for _, uid := range l.uids {
			byUID[uid] = l.index
		}
	}
	owner := func(requestID, uid string) int {
		if n, ok := byRequest[requestID]; ok && requestID != "" {
			byUID[uid] = n
			return n
		}
		if n, ok := byUID[uid]; ok {
			return n
		}
		return -1
	}
	a.resources = group(a.obs.Resources, func(x Resource) int { return owner(x.RequestID, x.UID) })
	a.reports = group(a.obs.Reports, func(x Report) int { return owner(x.RequestID, x.UID) })
	a.containers = group(a.obs.Containers, func(x Container) int { return owner(x.RequestID, x.UID) })
	a.remnants = group(a.obs.Remnants, func(x Remnant) int { return owner("", x.UID) })
	a.tombstones = group(a.obs.Tombstones, func(x Tombstone) int { return owner("", x.UID) })
}

func group[T any](all []T, owner func(T) int) map[int][]T {
	out := map[int][]T{}
	for _, x := range all {
		n := owner(x)
		out[n] = append(out[n], x)
	}
	return out
}

func (a *auditor) violate(kind Kind, l *life, format string, args ...any) {
	a.verdict.Violations = append(a.verdict.Violations, Violation{kind, l.index, l.name, fmt.Sprintf(format, args...)})
}

func (a *auditor) violateObject(kind Kind, subject, format string, args ...any) {
	a.verdict.Violations = append(a.verdict.Violations, Violation{kind, -1, subject, fmt.Sprintf(format, args...)})
}

// answers finds calls without an answer, and answers that deny an acknowledged sandbox.
func (a *auditor) answers(l *life) {
	for _, c := range l.calls {
		if c.Outcome == Unknown && (c.Op != Create || l.want == expectUnknown) {
			a.violate(Stuck, l, "%s had no answer to %d requests: %s", c.Op, c.Requests, c.Message)
		}
	}
	for _, c := range l.denials() {
		if a.excused(l) {
			a.verdict.LostWithAgent = append(a.verdict.LostWithAgent, l.index)
			return
		}
		if c.Op == Delete && a.endedBy(l, c) {
			a.verdict.Denied = append(a.verdict.Denied, l.index)
			continue
		}
		a.violate(Lost, l, "%s was refused with %s, but the sandbox was acknowledged and no client had deleted it", c.Op, c.Reason)
	}
}

// endedBy reports whether the custom resource existed when the delete was sent.
func (a *auditor) endedBy(l *life, del Call) bool {
	return slices.ContainsFunc(l.uids, func(uid string) bool {
		end, ok := a.obs.Ended[uid]
		return ok && end.After(del.Sent)
	})
}

// excused reports whether the only durable record was lost with its agent's Pod.
func (a *auditor) excused(l *life) bool {
	if slices.ContainsFunc(l.uids, func(uid string) bool { return a.obs.Seen[uid] }) {
		return false
	}
	for uid, pod := range a.killed {
		if pod == l.agent && !a.obs.Agents[uid] {
			return true
		}
	}
	return false
}

func (a *auditor) duplicates(l *life) {
	if len(l.uids) > 1 {
		a.violate(Duplicated, l, "one request_id was acknowledged with several sandboxes: %v", l.uids)
	}
	if n := len(a.resources[l.index]); n > 1 {
		a.violate(Duplicated, l, "one request_id has %d custom resources", n)
	}
	var running []string
	for _, c := range a.containers[l.index] {
		if c.Running && a.obs.Agents[c.AgentUID] {
			running = append(running, c.ID)
		}
	}
	if len(running) > 1 {
		a.violate(Duplicated, l, "several containers run for one sandbox: %v", running)
	}
}

// absent checks that nothing of the life is left.
func (a *auditor) absent(l *life) {
	for _, r := range a.resources[l.index] {
		if r.Deleting {
			a.violate(Stuck, l, "the custom resource is still being deleted, phase %s", r.Phase)
		} else {
			a.violate(Leaked, l, "the custom resource exists, phase %s", r.Phase)
		}
	}
	for _, r := range a.reports[l.index] {
		if r.State == StateTerminating || r.State == StateCreating {
			a.violate(Stuck, l, "agent %s still reports %s", r.AgentUID, r.State)
		} else {
			a.violate(Leaked, l, "agent %s reports %s", r.AgentUID, r.State)
		}
	}
	for _, c := range a.containers[l.index] {
		a.stray(l, c, "although the sandbox must not exist")
	}
	a.leftovers(l)
}

// stray reports a container that must not exist.
func (a *auditor) stray(l *life, c Container, why string) {
	a.orphan(c.ID, c.AgentUID)
	a.violate(Leaked, l, "container %s (running: %t) of agent %s (exists: %t) exists %s", c.ID, c.Running, c.AgentUID, a.obs.Agents[c.AgentUID], why)
}

// orphan records what an agent that does not exist has left for the node's janitor.
func (a *auditor) orphan(id, agentUID string) {
	if agentUID != "" && !a.obs.Agents[agentUID] {
		a.verdict.Orphans = append(a.verdict.Orphans, id)
	}
}

func (a *auditor) leftovers(l *life) {
	for _, r := range a.remnants[l.index] {
		a.orphan(r.ID, r.AgentUID)
		a.violate(Leaked, l, "%s %s exists without its container", r.Kind, r.ID)
	}
	for _, t := range a.tombstones[l.index] {
		a.violate(Stuck, l, "agent %s still has the tombstone of %s", t.AgentUID, t.UID)
	}
}

// counts compares counters with what they count: a reservation that is never released is capacity lost for good. A sandbox
// whose process has ended holds none.
func (a *auditor) counts() {
	reported, assigned, lost := map[string]int{}, 0, 0
	for _, r := range a.obs.Reports {
		if r.State != stateStopped {
			reported[r.AgentUID]++
		}
	}
	for _, r := range a.obs.Resources {
		switch {
		case r.Finished:
		case a.obs.Agents[r.AgentUID]:
			assigned++
		case r.AgentUID != "": // it waits for a reset, and may be counted or not
			lost++
		}
	}
	for uid, taken := range a.obs.Reserved {
		if a.obs.Agents[uid] && taken != reported[uid] {
			a.violateObject(Stuck, uid, "the allocator has %d reservations on the agent, the agent has %d sandboxes that have not ended", taken, reported[uid])
		}
	}
	if a.obs.Assigned < assigned || a.obs.Assigned > assigned+lost {
		a.violateObject(Stuck, "pool", "the pool's status counts %d sandboxes, %d are assigned, and %d to agents that do not exist", a.obs.Assigned, assigned, lost)
	}
}

// unowned checks what belongs to no request.
func (a *auditor) unowned() {
	for _, r := range a.resources[-1] {
		a.violateObject(Leaked, r.Name, "the custom resource %s belongs to no request", r.UID)
	}
	for _, r := range a.reports[-1] {
		a.violateObject(Leaked, r.UID, "agent %s reports %s as %s, which belongs to no request", r.AgentUID, r.Name, r.State)
	}
	for _, t := range a.tombstones[-1] {
		a.violateObject(Stuck, t.UID, "agent %s has a tombstone of %s, which belongs to no request", t.AgentUID, t.Name)
	}
	for _, r := range a.remnants[-1] {
		a.orphan(r.ID, r.AgentUID)
		a.violateObject(Leaked, r.ID, "%s exists without its container, and belongs to no request", r.Kind)
	}
	for _, c := range a.containers[-1] {
		a.orphan(c.ID, c.AgentUID)
		switch {
		case c.Slot && a.obs.Agents[c.AgentUID]:
		case c.Broken != "":
			a.violateObject(Leaked, c.ID, "the container's labels are invalid: %s", c.Broken)
		default:
			a.violateObject(Leaked, c.ID, "the container (running: %t, agent %s) belongs to no request", c.Running, c.AgentUID)
		}
	}
}
