package observe

import (
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// resource is a Sandbox as verdicts use it, with its metadata.uid.
type resource struct {
	verdict.Resource
	uid string
}

// NodeState is the observed state of a node. Create it with New; Run keeps it up to date.
type NodeState struct {
	config Config
	clock  clock.WithTicker
	looks  workqueue.TypedDelayingInterface[look]
	asks   workqueue.TypedDelayingInterface[string] // containers whose Sandboxes are to be requested from the API server

	mu        sync.Mutex
	inventory inventory
	agents    agents
	resources map[name]resource
	// synced: all Pods and Sandboxes of the API server were received; scanned: all containers were listed.
	synced, scanned bool
	changed         chan struct{} // closed at the next change
}

// look is a container to examine: by asking containerd (refresh), or with what is known.
type look struct {
	key     Key
	refresh bool
}

// New returns an empty NodeState.
func New(cfg Config) *NodeState {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &NodeState{
		config: cfg, clock: cfg.Clock,
		looks:     workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[look]{Clock: cfg.Clock}),
		asks:      workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Clock: cfg.Clock}),
		inventory: newInventory(), agents: newAgents(cfg.Policy.Grace), resources: map[name]resource{}, changed: make(chan struct{}),
	}
}

// Findings returns everything on the node with its verdict, in no order. The error is errdefs.ErrUnavailable before the first scan
// and sync.
func (s *NodeState) Findings() ([]Finding, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.unready(); err != nil {
		return nil, err
	}
	now := s.clock.Now()
	out := make([]Finding, 0, len(s.inventory.containers)+len(s.inventory.remnants))
	for _, e := range s.inventory.containers {
		s.judge(e, now)
		out = append(out, e.last)
	}
	for _, r := range s.inventory.remnants {
		s.judgeRemnant(r, now)
		out = append(out, r.last)
	}
	return out, nil
}

// Changed returns a channel that is closed when Findings may return something else, other than by the passing of time.
func (s *NodeState) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// Ready reports whether the first scan and the first sync are complete.
func (s *NodeState) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.unready() == nil
}

// unready returns what is missing for readiness. mu is held.
func (s *NodeState) unready() error {
	switch {
	case !s.scanned:
		return fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "the containers of this node have not been listed yet")
	case !s.synced:
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "the Pods and Sandboxes of the API server have not been received yet")
	}
	return nil
}

// notify wakes up all that wait for a change. mu is held.
func (s *NodeState) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// put records a container as containerd returned it. mu is held.
func (s *NodeState) put(c Container, seen time.Time) *entry {
	if e := s.inventory.containers[c.ID]; c.Defect != "" && (e == nil || c.Defect != e.container.Defect) {
		s.config.Log.Info("container has inconsistent labels", obs.KeyContainer, c.ID, obs.KeyAgentUID, c.Identity.AgentUID, obs.KeyReason, c.Defect)
	}
	return s.inventory.put(c, seen)
}

// drop removes a container that no longer exists. mu is held.
func (s *NodeState) drop(id string) {
	if s.inventory.drop(id) {
		s.notify()
	}
}
