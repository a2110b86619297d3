package observe

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// resourceOf reads a Sandbox; status is nil if only metadata is known. The phase Expired and the number of the last attempt matter
// only without an assignment, and a Sandbox without one is not in the cache: it lacks the node's label.
func resourceOf(meta *metav1.ObjectMeta, status *v1alpha1.SandboxStatus) resource {
	s := v1alpha1.Sandbox{ObjectMeta: *meta}
	r := resource{uid: string(meta.UID), Resource: verdict.Resource{State: verdict.ResourcePresent, UID: s.EffectiveUID()}}
	switch {
	case meta.DeletionTimestamp != nil:
		r.State = verdict.ResourceTerminating
	case status != nil && status.Phase == v1alpha1.PhaseExpired:
		r.State = verdict.ResourceExpired
	}
	a, err := s.Assignment()
	switch {
	case err != nil:
		r.Unreadable = true
	case a != nil:
		r.Assignment = &verdict.Assignment{AgentUID: a.AgentUID, Attempt: a.Attempt}
	case status != nil:
		r.Attempt = status.Attempt
	}
	return r
}

// agentEndDelay is the time from the end of an agent's Pod to a scan for what it left.
const agentEndDelay = time.Second

// SetPod records a Pod of this node that the API server has. ended reports whether it has ended for good, as an evicted one has.
func (s *NodeState) SetPod(uid string, ended bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.agents.set(uid, ended, s.clock.Now()) {
		return
	}
	s.judgeAgent(uid)
	if ended && s.inventory.named(uid) {
		s.looks.AddAfter(whole(), agentEndDelay) // an agent that ends in the middle of a create leaves more than containers
	}
}

// RemovePod records that a Pod was deleted.
func (s *NodeState) RemovePod(uid string) { s.SetPod(uid, true) }

// SetSandbox records a Sandbox that is assigned to this node.
func (s *NodeState) SetSandbox(meta *metav1.ObjectMeta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{meta.Namespace, meta.Name}
	s.resources[n] = resourceOf(meta, nil)
	s.judgeName(n)
}

// RemoveSandbox records that a Sandbox was deleted, or is no longer assigned to this node. The API server is asked at once which of
// the two it is, and whether another Sandbox has taken the name: containers of a sandbox that runs elsewhere, or whose name is
// taken, need no grace period.
func (s *NodeState) RemoveSandbox(meta *metav1.ObjectMeta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := name{meta.Namespace, meta.Name}
	delete(s.resources, n)
	for _, e := range s.inventory.byName[n] {
		e.live, e.liveUntil = resource{}, time.Time{} // outdated
	}
	s.judgeName(n)
	now := s.clock.Now()
	for _, e := range s.inventory.byName[n] {
		e.asking, e.askAfter = false, now
		s.recheckLive(e, now)
	}
}

// SetSynced records that all Pods and Sandboxes of the API server were received.
func (s *NodeState) SetSynced() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.synced = true
	s.judgeAll() // verdicts before that were not reported
	s.notify()
}
