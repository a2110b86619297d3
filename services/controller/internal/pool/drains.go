package pool

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/utils/clock"
)

// drains remembers the last response of each draining agent, by the uid of its Pod. All of it may be lost: agents are asked
// again.
type drains struct {
	clock clock.PassiveClock

	mu     sync.Mutex
	agents map[types.UID]*drainState
	pods   map[types.NamespacedName]sets.Set[types.UID] // of each pool
}

type drainState struct {
	drainResponse

	silentSince time.Time // zero while it answers
	reported    bool      // an Event has reported that it does not answer
}

// drainResponse is the response of an agent.
type drainResponse struct {
	at time.Time
	// sandboxes is the number of sandboxes that the agent has.
	sandboxes int
	// drained: the agent admits no new sandboxes.
	drained bool
	// empty: the agent also has no sandboxes and no tombstones.
	empty bool
	// err is why the agent did not respond.
	err error
}

func newDrains(c clock.PassiveClock) *drains {
	return &drains{clock: c, agents: map[types.UID]*drainState{}, pods: map[types.NamespacedName]sets.Set[types.UID]{}}
}

func (d *drains) answered(pod types.UID, response drainResponse) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.agents[pod]
	if s == nil {
		s = &drainState{}
		d.agents[pod] = s
	}
	s.drainResponse = response
	switch {
	case response.err == nil:
		s.silentSince, s.reported = time.Time{}, false
	case s.silentSince.IsZero():
		s.silentSince = response.at
	}
}

// last returns the agent's last response, or the zero response.
func (d *drains) last(pod types.UID) drainResponse {
	d.mu.Lock()
	defer d.mu.Unlock()
	if s := d.agents[pod]; s != nil {
		return s.drainResponse
	}
	return drainResponse{}
}

// due reports whether the agent was not asked within the interval.
func (d *drains) due(pod types.UID, interval time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.agents[pod]
	return s == nil || d.clock.Since(s.at) >= interval
}

// silent reports whether the agent did not answer when it was asked last.
func (d *drains) silent(pod types.UID) bool { return d.last(pod).err != nil }

// reportSilence reports, once, whether the agent has not answered for the duration.
func (d *drains) reportSilence(pod types.UID, duration time.Duration) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.agents[pod]
	if s == nil || s.reported || s.silentSince.IsZero() || d.clock.Since(s.silentSince) < duration {
		return false
	}
	s.reported = true
	return true
}

// dropReservations ignores the reservations on an agent that has confirmed Drain: it refuses their holders, however long the
// Registry keeps them.
func (d *drains) dropReservations(m *member) {
	if m.drain != "" && d.last(m.pod.UID).drained {
		m.usage.Reserved = 0
	}
}

func (d *drains) forget(pod types.UID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.agents, pod)
}

// keep forgets the Pods of a pool that do not exist.
func (d *drains) keep(pool types.NamespacedName, existing sets.Set[types.UID]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for uid := range d.pods[pool].Difference(existing) {
		delete(d.agents, uid)
	}
	d.pods[pool] = existing
	if existing.Len() == 0 {
		delete(d.pods, pool)
	}
}
