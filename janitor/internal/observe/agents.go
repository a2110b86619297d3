package observe

import (
	"time"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// memory is how long a Pod that the API server had is remembered after the last thing on the node that named it.
const memory = time.Hour

// agents is what is known about the Pods of agents. It has no lock: NodeState.mu guards it. Nothing in it blocks.
type agents struct {
	// grace is how long the node must have run no container of a Pod that the API server never had before the Pod counts as gone.
	grace time.Duration
	// pods are the Pods of the node that have not ended, from the cache; running are those of which the node runs a container.
	pods, running map[string]bool
	// known is when each Pod that the API server ever had was last named.
	known map[string]time.Time
	// strangers is, for agents that the API server never had, since when the node has run none of their containers either.
	strangers map[string]time.Time
}

func newAgents(grace time.Duration) agents {
	return agents{grace: grace, pods: map[string]bool{}, running: map[string]bool{}, known: map[string]time.Time{}, strangers: map[string]time.Time{}}
}

// set records a Pod of the API server, and reports whether that changes the state of its agent.
func (a *agents) set(uid string, ended bool, now time.Time) (changed bool) {
	_, knew := a.known[uid]
	was := a.pods[uid]
	a.known[uid] = now
	if ended {
		delete(a.pods, uid)
	} else {
		a.pods[uid] = true
	}
	return was == ended || !knew
}

// state returns the state of an agent's Pod according to the caches; complete reports whether these hold everything.
func (a *agents) state(uid string, complete bool, now time.Time) verdict.Agent {
	if a.pods[uid] {
		delete(a.strangers, uid)
		return verdict.AgentAlive
	}
	if !complete {
		return verdict.AgentUnknown
	}
	return a.absent(uid, a.running[uid], now)
}

// absent returns the state of an agent's Pod that the API server does not have. A Pod that it had is gone. One that it never had,
// as far as this process knows, may belong to another cluster whose kubelet runs on this node; if the node has run none of its
// containers for the grace period, it is gone in any case.
func (a *agents) absent(uid string, running bool, now time.Time) verdict.Agent {
	if _, ok := a.known[uid]; ok {
		return verdict.AgentGone
	}
	if running {
		delete(a.strangers, uid)
		return verdict.AgentForeign
	}
	since, ok := a.strangers[uid]
	if !ok {
		since = now
		a.strangers[uid] = now
	}
	if now.Sub(since) < a.grace {
		return verdict.AgentUnknown
	}
	return verdict.AgentGone
}

// undecided reports whether the state of an agent's Pod changes by the passing of time alone.
func (a *agents) undecided(uid string) bool {
	_, ok := a.strangers[uid]
	return ok
}

// forget drops the Pods that nothing on the node has named for a long time.
func (a *agents) forget(now time.Time, named func(uid string) bool) {
	for uid, last := range a.known {
		switch {
		case a.pods[uid] || named(uid):
			a.known[uid] = now
		case now.Sub(last) > memory:
			delete(a.known, uid)
		}
	}
	for uid := range a.strangers {
		if !named(uid) {
			delete(a.strangers, uid)
		}
	}
}
