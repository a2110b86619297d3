package observe

import (
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// resourceOf reads a Sandbox; status is nil where there are only metadata. A phase of Expired, and the number of an attempt
// that is over, are of use only where no assignment is, and a Sandbox without one is not in the cache: it has no node's label.
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

// SetPod takes in a Pod of this node that the API server has; ended tells that it has ended for good, as one that was evicted.
func (b *Board) SetPod(uid string, ended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, knew := b.known[uid]
	was := b.pods[uid]
	b.known[uid] = b.clock.Now()
	if ended {
		delete(b.pods, uid)
	} else {
		b.pods[uid] = true
	}
	if was == ended || !knew {
		b.judgeAgent(uid)
	}
}

// RemovePod takes in that a Pod is no more.
func (b *Board) RemovePod(uid string) { b.SetPod(uid, true) }

// judgeAgent judges all that names an agent. mu is held.
func (b *Board) judgeAgent(uid string) {
	now := b.clock.Now()
	for _, e := range b.byAgent[uid] {
		b.judge(e, now)
	}
	for _, r := range b.remnants {
		if r.ownedBy(uid) {
			b.judgeRemnant(r, now)
		}
	}
}

// SetSandbox takes in a Sandbox that says that it runs on this node.
func (b *Board) SetSandbox(meta *metav1.ObjectMeta) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := name{meta.Namespace, meta.Name}
	b.resources[n] = resourceOf(meta, nil)
	b.judgeName(n)
}

// RemoveSandbox takes in that a Sandbox is no more, or says no more that it runs on this node. Which of the two, and whether
// another has its name by now, the API server itself is asked at once for each container of its name: what runs elsewhere, or
// is another's, is not waited for.
func (b *Board) RemoveSandbox(meta *metav1.ObjectMeta) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n := name{meta.Namespace, meta.Name}
	delete(b.resources, n)
	for _, e := range b.byName[n] {
		e.live, e.liveUntil = resource{}, time.Time{} // that was before
	}
	b.judgeName(n)
	now := b.clock.Now()
	for _, e := range b.byName[n] {
		e.asking, e.askAfter = false, now
		b.wonder(e, now)
	}
}

// judgeName judges all containers of one name. mu is held.
func (b *Board) judgeName(n name) {
	now := b.clock.Now()
	for _, e := range b.byName[n] {
		b.judge(e, now)
	}
}

// SetSynced takes in that all Pods and Sandboxes that the API server holds were told of.
func (b *Board) SetSynced() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.synced = true
	b.judgeAll() // nobody was told of what was found before
	b.notify()
}

// judgeAll judges everything, and tells again of what was told of before. mu is held.
func (b *Board) judgeAll() {
	now := b.clock.Now()
	for _, e := range b.containers {
		b.judge(e, now)
		b.remind(&e.last)
	}
	for _, r := range b.remnants {
		b.judgeRemnant(r, now)
		b.remind(&r.last)
	}
}

// remind tells again of an orphan, and of what only the API server itself can settle. mu is held.
func (b *Board) remind(f *Finding) {
	if f.Verdict.Action == verdict.Delete || f.Verdict.Reason == verdict.CreateInFlight {
		b.orphan(f.Key)
	}
}

// orphan tells who sweeps of a thing, once there is something by which it can be confirmed. mu is held.
func (b *Board) orphan(key Key) {
	if b.unready() == nil {
		b.config.Orphan(key)
	}
}
