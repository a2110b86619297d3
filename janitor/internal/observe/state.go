package observe

import (
	"sync"

	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
)

// NodeState is the observed state of a node. Create it with New; Run keeps it up to date.
type NodeState struct {
	mu sync.Mutex
	evidence
}

// New returns an empty NodeState.
func New(cfg Config) *NodeState {
	if cfg.Clock == nil {
		cfg.Clock = clock.RealClock{}
	}
	return &NodeState{evidence: evidence{
		config: cfg, clock: cfg.Clock,
		looks:     workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[look]{Clock: cfg.Clock}),
		asks:      workqueue.NewTypedDelayingQueueWithConfig(workqueue.TypedDelayingQueueConfig[string]{Clock: cfg.Clock}),
		inventory: newInventory(), agents: newAgents(cfg.Policy.Grace), resources: map[name]resource{}, changed: make(chan struct{}),
	}}
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
