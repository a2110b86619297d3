package audit

import (
	"fmt"
	"slices"
	"time"
)

// expiryMargin is how long after its expire time a sandbox must be Expired, and before it must not be.
const expiryMargin = 15 * time.Second

// auditor holds the observations sorted by life.
type auditor struct {
	obs    Observations
	killed map[string]string // uid of an agent Pod that was killed -> its name
	lives  []*life
	// What belongs to which life; -1 for nobody's.
	resources  map[int][]Resource
	reports    map[int][]Report
	containers map[int][]Container
	remnants   map[int][]Remnant
	tombstones map[int][]Tombstone
	verdict    Verdict
}

// Audit judges. calls is the whole log, strikes all faults of the run.
func Audit(calls []Call, strikes []Strike, obs Observations) Verdict {
	a := &auditor{obs: obs, killed: map[string]string{}, lives: livesOf(calls)}
	for _, s := range strikes {
		if s.AgentUID != "" {
			a.killed[s.AgentUID] = s.AgentPod
		}
	}
	a.sort()
	for _, l := range a.lives {
		a.answers(l)
		a.duplicates(l)
		switch l.want {
		case nothing:
			a.absent(l)
		case something:
			a.present(l)
		case anything:
		}
	}
	a.unowned()
	a.counts()
	return a.verdict
}

// sort finds each thing's life: by request id, which is on everything, or by uid where a record lacks it.
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

func (a *auditor) say(kind Kind, l *life, format string, args ...any) {
	a.verdict.Violations = append(a.verdict.Violations, Violation{kind, l.index, l.name, fmt.Sprintf(format, args...)})
}

func (a *auditor) sayOf(kind Kind, subject, format string, args ...any) {
	a.verdict.Violations = append(a.verdict.Violations, Violation{kind, -1, subject, fmt.Sprintf(format, args...)})
}

// answers looks for calls that nobody answered, and for answers that deny what was acknowledged.
func (a *auditor) answers(l *life) {
	for _, c := range l.calls {
		if c.Outcome == Unknown && (c.Op != Create || l.want == anything) {
			a.say(Stuck, l, "%s was never answered in %d tries: %s", c.Op, c.Tries, c.Message)
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
		a.say(Lost, l, "%s was refused with %s, but the sandbox was acknowledged and nobody had deleted it", c.Op, c.Reason)
	}
}

// endedBy tells that the custom resource was there, and in nobody's way, when the delete was sent.
func (a *auditor) endedBy(l *life, del Call) bool {
	return slices.ContainsFunc(l.uids, func(uid string) bool {
		end, ok := a.obs.Ended[uid]
		return ok && end.After(del.Sent)
	})
}

// excused tells that the only durable record went with its agent's Pod.
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
		a.say(Duplicated, l, "one request_id was acknowledged with several sandboxes: %v", l.uids)
	}
	if n := len(a.resources[l.index]); n > 1 {
		a.say(Duplicated, l, "one request_id has %d custom resources", n)
	}
	var running []string
	for _, c := range a.containers[l.index] {
		if c.Running && a.obs.Agents[c.AgentUID] {
			running = append(running, c.ID)
		}
	}
	if len(running) > 1 {
		a.say(Duplicated, l, "several containers run for one sandbox: %v", running)
	}
}

// absent expects that nothing of the life is left.
func (a *auditor) absent(l *life) {
	for _, r := range a.resources[l.index] {
		if r.Deleting {
			a.say(Stuck, l, "the custom resource is still being deleted, phase %s", r.Phase)
		} else {
			a.say(Leaked, l, "the custom resource is there, phase %s", r.Phase)
		}
	}
	for _, r := range a.reports[l.index] {
		if r.State == StateTerminating || r.State == StateCreating {
			a.say(Stuck, l, "agent %s still reports %s", r.AgentUID, r.State)
		} else {
			a.say(Leaked, l, "agent %s reports %s", r.AgentUID, r.State)
		}
	}
	for _, c := range a.containers[l.index] {
		a.stray(l, c, "though nothing should be left")
	}
	a.leftovers(l)
}

// stray is a container that should not be there.
func (a *auditor) stray(l *life, c Container, why string) {
	if _, killed := a.killed[c.AgentUID]; killed && !a.obs.Agents[c.AgentUID] {
		a.verdict.Orphans = append(a.verdict.Orphans, c.ID)
		return
	}
	a.say(Leaked, l, "container %s (running: %t) is there on agent %s (exists: %t) %s", c.ID, c.Running, c.AgentUID, a.obs.Agents[c.AgentUID], why)
}

func (a *auditor) leftovers(l *life) {
	for _, r := range a.remnants[l.index] {
		if a.orphaned(r.AgentUID) {
			a.verdict.Orphans = append(a.verdict.Orphans, r.ID)
			continue
		}
		a.say(Leaked, l, "%s %s is there without its container", r.Kind, r.ID)
	}
	for _, t := range a.tombstones[l.index] {
		a.say(Stuck, l, "agent %s still has the tombstone of %s", t.AgentUID, t.UID)
	}
}

// counts holds what others count against what is there: a place that nobody gives back is gone for good.
func (a *auditor) counts() {
	reported, assigned, lost := map[string]int{}, 0, 0
	for _, r := range a.obs.Reports {
		reported[r.AgentUID]++
	}
	for _, r := range a.obs.Resources {
		switch {
		case a.obs.Agents[r.AgentUID]:
			assigned++
		case r.AgentUID != "": // it waits for a reset, and counts or not
			lost++
		}
	}
	for uid, taken := range a.obs.Places {
		if a.obs.Agents[uid] && taken != reported[uid] {
			a.sayOf(Stuck, uid, "the allocator holds %d places of the agent for taken, the agent has %d sandboxes", taken, reported[uid])
		}
	}
	if a.obs.Assigned < assigned || a.obs.Assigned > assigned+lost {
		a.sayOf(Stuck, "pool", "the pool's status counts %d sandboxes, %d are assigned, and %d to agents that are gone", a.obs.Assigned, assigned, lost)
	}
}

// orphaned tells whether an agent's Pod was killed and is gone: what it left is for the node's janitor.
func (a *auditor) orphaned(agentUID string) bool {
	_, killed := a.killed[agentUID]
	return killed && !a.obs.Agents[agentUID]
}

// unowned looks at what no client asked for.
func (a *auditor) unowned() {
	for _, r := range a.resources[-1] {
		a.sayOf(Leaked, r.Name, "the custom resource %s belongs to no request", r.UID)
	}
	for _, r := range a.reports[-1] {
		a.sayOf(Leaked, r.UID, "agent %s reports %s as %s, which belongs to no request", r.AgentUID, r.Name, r.State)
	}
	for _, t := range a.tombstones[-1] {
		a.sayOf(Stuck, t.UID, "agent %s has a tombstone of %s, which belongs to no request", t.AgentUID, t.Name)
	}
	for _, r := range a.remnants[-1] {
		if a.orphaned(r.AgentUID) {
			a.verdict.Orphans = append(a.verdict.Orphans, r.ID)
			continue
		}
		a.sayOf(Leaked, r.ID, "%s is there without its container, and belongs to no request", r.Kind)
	}
	for _, c := range a.containers[-1] {
		switch {
		case a.orphaned(c.AgentUID):
			a.verdict.Orphans = append(a.verdict.Orphans, c.ID)
		case c.Slot && a.obs.Agents[c.AgentUID]:
		case c.Broken != "":
			a.sayOf(Leaked, c.ID, "the container's labels do not add up: %s", c.Broken)
		default:
			a.sayOf(Leaked, c.ID, "the container (running: %t, agent %s) belongs to no request", c.Running, c.AgentUID)
		}
	}
}
