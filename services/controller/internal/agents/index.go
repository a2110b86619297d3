// Package agents is what the controller knows of agents: an index of the allocator's Registry, kept by one WatchAgents
// stream, and the connections to the agents themselves. It decides nothing and writes nothing. Everything exported is
// safe for concurrent use; subscribers are called without any lock held.
package agents

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
)

// tombstoneTime is how long the word that a container is gone is kept for whoever waits for it.
const tombstoneTime = 5 * time.Minute

// Agent is the Registry's view of one agent. Its messages are shared: never change them.
type Agent struct {
	*allocatorv1.Agent
	// Sandboxes are the reports of its sandboxes, the terminated ones left out.
	Sandboxes []*agentv1.SandboxReport
}

// Standing is what the Registry lets one say of an agent.
type Standing int

// The standings.
const (
	// Unknown: the Registry cannot be read now, or has not been read yet. Nothing follows from it.
	Unknown Standing = iota
	// Present: the agent is heard of and takes sandboxes.
	Present
	// Quiet: the agent takes no sandboxes, or has not been heard of yet. The Registry does not tell whether it still is heard
	// of: the agent itself has to be asked.
	Quiet
	// Silent: the Registry has heard of the agent, and not any more for its heartbeat timeout.
	Silent
	// Absent: the Registry knows no such agent.
	Absent
)

// reasonHeartbeat is the Registry's word (allocator.v1.Agent.reason) for an agent that it does not hear any more. What
// the Registry says counts, not the time that it says: its clock may be another than this process's.
const reasonHeartbeat = "HeartbeatTimeout"

// Subscriber is told of changes. Its functions must not block; nil ones are left out.
type Subscriber struct {
	// Sandbox: the report of a sandbox, or the standing of its agent, has changed.
	Sandbox func(sandbox types.NamespacedName)
	// Pool: the agents of a pool, or what runs on them, have changed.
	Pool func(pool types.NamespacedName)
	// Synced: the whole Registry has been read anew, and anything may have changed meanwhile.
	Synced func()
}

// Index is the Registry's content. Make it with NewIndex.
type Index struct {
	clock clock.PassiveClock

	mu          sync.RWMutex
	synced      bool
	live        content
	staging     *content // of a stream that has not sent SYNCED yet
	subscribers []Subscriber
}

// content is one reading of the Registry.
type content struct {
	agents map[string]*entry          // by Pod uid
	bySbx  map[string]map[string]bool // sandbox uid -> Pod uids of the agents that report it
}

type entry struct {
	agent   *allocatorv1.Agent
	reports map[reportKey]*report
}

type reportKey struct {
	uid     string
	attempt int64
}

type report struct {
	*agentv1.SandboxReport
	goneAt time.Time // when it became TERMINATED; zero before
}

// NewIndex returns an empty index that is not synced.
func NewIndex(c clock.PassiveClock) *Index { return &Index{clock: c, live: newContent()} }

func newContent() content {
	return content{agents: map[string]*entry{}, bySbx: map[string]map[string]bool{}}
}

// Subscribe adds a subscriber for as long as the index lives.
func (x *Index) Subscribe(s Subscriber) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.subscribers = append(x.subscribers, s)
}

// Synced tells whether the index follows the Registry now.
func (x *Index) Synced() bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.synced
}

// Report is the last word of the fence's agent on the fence's container, or nil. A container that is gone is reported as
// TERMINATED for a while.
func (x *Index) Report(f *agentv1.Fence) *agentv1.SandboxReport {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if e := x.live.agents[f.GetAgentUid()]; e != nil {
		if r := e.reports[reportKey{f.GetSandboxUid(), f.GetAttempt()}]; r != nil {
			return r.SandboxReport
		}
	}
	return nil
}

// Reports are the words of all agents on all containers of a sandbox that are not known to be gone.
func (x *Index) Reports(sandboxUID string) []*agentv1.SandboxReport {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []*agentv1.SandboxReport
	for uid := range x.live.bySbx[sandboxUID] {
		for k, r := range x.live.agents[uid].reports {
			if k.uid == sandboxUID && r.goneAt.IsZero() {
				out = append(out, r.SandboxReport)
			}
		}
	}
	return out
}

// Agent is the agent whose Pod has the uid.
func (x *Index) Agent(podUID string) (Agent, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e := x.live.agents[podUID]
	if e == nil {
		return Agent{}, false
	}
	return e.view(), true
}

// Pool are the agents of a pool, in no order.
func (x *Index) Pool(pool types.NamespacedName) []Agent {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []Agent
	for _, e := range x.live.agents {
		if e.pool() == pool {
			out = append(out, e.view())
		}
	}
	return out
}

// Standing tells how the agent stands.
func (x *Index) Standing(podUID string) Standing {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e := x.live.agents[podUID]
	switch {
	case !x.synced:
		return Unknown
	case e == nil:
		return Absent
	case e.agent.GetReady():
		return Present
	case e.agent.GetReason() == reasonHeartbeat:
		return Silent
	default:
		return Quiet
	}
}

func (e *entry) view() Agent {
	a := Agent{Agent: e.agent}
	for _, r := range e.reports {
		if r.goneAt.IsZero() {
			a.Sandboxes = append(a.Sandboxes, r.SandboxReport)
		}
	}
	return a
}

func (e *entry) pool() types.NamespacedName {
	return types.NamespacedName{Namespace: e.agent.GetInfo().GetNamespace(), Name: e.agent.GetInfo().GetPool()}
}

// changes collects who is to be told.
type changes struct {
	sandboxes, pools map[types.NamespacedName]bool
	synced           bool
}

func newChanges() changes {
	return changes{sandboxes: map[types.NamespacedName]bool{}, pools: map[types.NamespacedName]bool{}}
}

func (c changes) sandbox(r *agentv1.SandboxReport) {
	c.sandboxes[types.NamespacedName{Namespace: r.GetRecord().GetNamespace(), Name: r.GetRecord().GetName()}] = true
}

func keyOf(r *agentv1.SandboxReport) reportKey {
	return reportKey{r.GetRecord().GetFence().GetSandboxUid(), r.GetRecord().GetFence().GetAttempt()}
}
