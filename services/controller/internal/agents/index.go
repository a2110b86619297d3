// Package agents is the controller's view of the agents: an index of the allocator's Registry, which one WatchAgents stream
// keeps up to date, and the connections to the agents. It makes no decisions and writes nothing. All exported functions and
// methods may be called concurrently; subscribers are called without a lock held.
package agents

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// terminatedRetention is how long the report of a container that was removed is kept.
const terminatedRetention = 5 * time.Minute

// Agent is the Registry's view of an agent. Its messages are shared and must not be modified.
type Agent struct {
	*allocatorv1.Agent
	// Sandboxes are the reports of its sandboxes, without terminated ones.
	Sandboxes []*agentv1.SandboxReport
}

// Status is what the Registry knows about the availability of an agent.
type Status int

// The statuses.
const (
	// Unknown: the Registry cannot be read now, or has not been read yet. It permits no conclusion.
	Unknown Status = iota
	// Ready: the agent sends heartbeats and accepts sandboxes.
	Ready
	// NotReady: the agent accepts no sandboxes, or has not sent a heartbeat yet. The Registry does not show whether it still
	// sends heartbeats: only the agent itself can say so.
	NotReady
	// Silent: the agent has sent no heartbeat for the Registry's heartbeat timeout.
	Silent
	// Absent: the Registry does not have the agent.
	Absent
)

// reasonHeartbeat is the Registry's reason (allocator.v1.Agent.reason) for an agent whose heartbeats have stopped. The
// reason counts and not the heartbeat's time, because the allocator's clock may differ from that of this process.
const reasonHeartbeat = "HeartbeatTimeout"

// defaultHeartbeatTimeout is the heartbeat timeout until the allocator has sent its own (seed 002).
const defaultHeartbeatTimeout = 10 * time.Second

// Subscriber receives changes. Nil functions are ignored.
type Subscriber struct {
	// Sandbox: the report of a sandbox, or the status of its agent, has changed.
	Sandbox func(sandbox types.NamespacedName)
	// Pool: the agents of a pool, or the sandboxes on them, have changed.
	Pool func(pool types.NamespacedName)
	// Synced: the whole Registry was read again. Anything may have changed since it was read last.
	Synced func()
}

// Index is the content of the Registry. Create it with NewIndex.
type Index struct {
	clock clock.PassiveClock

	mu               sync.RWMutex
	synced           bool
	heartbeatTimeout time.Duration // the Registry's; see HeartbeatTimeout
	live             content
	staging          *content // read from a stream that has not sent SYNCED yet
	subscribers      []Subscriber
}

// content is the Registry as it was read by one stream.
type content struct {
	agents    map[string]*entry          // by Pod uid
	bySandbox map[string]map[string]bool // sandbox uid -> Pod uids of the agents that report it
}

type entry struct {
	agent   *allocatorv1.Agent
	reports map[identity.Fence]*report
}

type report struct {
	*agentv1.SandboxReport
	terminatedAt time.Time // when the container was reported as removed; zero before
}

// NewIndex returns an empty index that is not synced.
func NewIndex(c clock.PassiveClock) *Index {
	return &Index{clock: c, heartbeatTimeout: defaultHeartbeatTimeout, live: newContent()}
}

func newContent() content {
	return content{agents: map[string]*entry{}, bySandbox: map[string]map[string]bool{}}
}

// HeartbeatTimeout returns how long an agent may be silent before it counts as lost. It is the allocator's setting.
func (x *Index) HeartbeatTimeout() time.Duration {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.heartbeatTimeout
}

// Subscribe adds a subscriber. It cannot be removed.
func (x *Index) Subscribe(s Subscriber) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.subscribers = append(x.subscribers, s)
}

// Synced reports whether the index follows the Registry now.
func (x *Index) Synced() bool {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.synced
}

// Report returns the last report of the fence's agent on the fence's container, or nil. The report of a container that was
// removed is kept for five minutes, in the state TERMINATED.
func (x *Index) Report(f identity.Fence) *agentv1.SandboxReport {
	x.mu.RLock()
	defer x.mu.RUnlock()
	if e := x.live.agents[f.AgentUID]; e != nil {
		if r := e.reports[f]; r != nil {
			return r.SandboxReport
		}
	}
	return nil
}

// Reports returns the reports of all agents on all containers of a sandbox that are not removed.
func (x *Index) Reports(sandboxUID string) []*agentv1.SandboxReport {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var out []*agentv1.SandboxReport
	for uid := range x.live.bySandbox[sandboxUID] {
		for f, r := range x.live.agents[uid].reports {
			if f.SandboxUID == sandboxUID && r.terminatedAt.IsZero() {
				out = append(out, r.SandboxReport)
			}
		}
	}
	return out
}

// Agent returns the agent with the Pod uid.
func (x *Index) Agent(podUID string) (Agent, bool) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e := x.live.agents[podUID]
	if e == nil {
		return Agent{}, false
	}
	return e.view(), true
}

// Pool returns the agents of a pool, in no particular order.
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

// Status returns the status of the agent with the Pod uid.
func (x *Index) Status(podUID string) Status {
	x.mu.RLock()
	defer x.mu.RUnlock()
	e := x.live.agents[podUID]
	switch {
	case !x.synced:
		return Unknown
	case e == nil:
		return Absent
	case e.agent.GetReady():
		return Ready
	case e.agent.GetReason() == reasonHeartbeat:
		return Silent
	default:
		return NotReady
	}
}

func (e *entry) view() Agent {
	a := Agent{Agent: e.agent}
	for _, r := range e.reports {
		if r.terminatedAt.IsZero() {
			a.Sandboxes = append(a.Sandboxes, r.SandboxReport)
		}
	}
	return a
}

func (e *entry) pool() types.NamespacedName {
	return types.NamespacedName{Namespace: e.agent.GetInfo().GetNamespace(), Name: e.agent.GetInfo().GetPool()}
}

// changes collects what the subscribers have to receive.
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

// fenceOf returns the key of an agent's report. The agent that sent the report counts, not the one that the record names.
func fenceOf(agentUID string, r *agentv1.SandboxReport) identity.Fence {
	f := identity.FenceOf(r.GetRecord().GetFence())
	f.AgentUID = agentUID
	return f
}
