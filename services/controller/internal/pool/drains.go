package pool

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"
)

// drains remember what draining agents said last, by Pod uid. All of it may be lost: agents are asked again.
type drains struct {
	clock clock.PassiveClock

	mu sync.Mutex
	by map[types.UID]*talk
	// pods are the Pods of each pool that were seen last.
	pods map[types.NamespacedName]sets.Set[types.UID]
}

// talk is what was heard of one agent.
type talk struct {
	answer

	failing time.Time // since when it has not answered; zero while it does
	told    bool      // that it does not has been told
}

// answer is one word of an agent.
type answer struct {
	at   time.Time
	left int
	// drained tells that it admits no sandbox any more.
	drained bool
	// empty tells that it has no sandbox, gets none, and keeps nothing for anybody.
	empty bool
	// err is why there is no answer.
	err error
}

func newDrains(c clock.PassiveClock) *drains {
	return &drains{clock: c, by: map[types.UID]*talk{}, pods: map[types.NamespacedName]sets.Set[types.UID]{}}
}

func (d *drains) answered(pod types.UID, a answer) {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.by[pod]
	if t == nil {
		t = &talk{}
		d.by[pod] = t
	}
	t.answer = a
	switch {
	case a.err == nil:
		t.failing, t.told = time.Time{}, false
	case t.failing.IsZero():
		t.failing = a.at
	}
}

// last is the agent's last word; the zero answer if there is none.
func (d *drains) last(pod types.UID) answer {
	d.mu.Lock()
	defer d.mu.Unlock()
	if t := d.by[pod]; t != nil {
		return t.answer
	}
	return answer{}
}

// due tells that the agent was not asked within the interval.
func (d *drains) due(pod types.UID, interval time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.by[pod]
	return t == nil || d.clock.Since(t.at) >= interval
}

// silent tells that the agent did not answer when it was asked last.
func (d *drains) silent(pod types.UID) bool { return d.last(pod).err != nil }

// complain tells once that an agent has not answered for a while.
func (d *drains) complain(pod types.UID, while time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	t := d.by[pod]
	if t == nil || t.told || t.failing.IsZero() || d.clock.Since(t.failing) < while {
		return false
	}
	t.told = true
	return true
}

func (d *drains) forget(pod types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.by, pod)
}

// keep forgets the Pods of a pool that are not there any more.
func (d *drains) keep(pool types.NamespacedName, seen sets.Set[types.UID]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for uid := range d.pods[pool].Difference(seen) {
		delete(d.by, uid)
	}
	d.pods[pool] = seen
	if seen.Len() == 0 {
		delete(d.pods, pool)
	}
}
