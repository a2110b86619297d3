package sandbox

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// memory is what this process remembers of each sandbox. All of it may be lost at any time: it saves calls and writes, and
// correctness never depends on it.
type memory struct {
	clock clock.PassiveClock

	creates  table[createHistory]
	silences table[time.Time]
	holds    table[hold]
	versions table[map[string]bool]
}

// createHistory is the history of the creates of one sandbox.
type createHistory struct {
	// failures is the number of consecutive creates that failed for a reason that is not in the request.
	failures int
	// lastError is why the last create failed; nil after a success.
	lastError *cause
	// excluded are agents that must not be chosen, by Pod uid, and until when.
	excluded map[string]time.Time
}

// hold is a container that may exist: the last assignment that was observed, and its grace period.
type hold struct {
	v1alpha1.Assignment

	grace *time.Duration
}

func newMemory(c clock.PassiveClock) *memory { return &memory{clock: c} }

// forget drops all that is remembered of a sandbox.
func (m *memory) forget(n types.NamespacedName) {
	m.creates.forget(n)
	m.silences.forget(n)
	m.holds.forget(n)
	m.versions.forget(n)
}

// createFailed records a failed create and returns the number of consecutive ones.
func (m *memory) createFailed(n types.NamespacedName) int {
	failures := 0
	m.creates.update(n, func(h *createHistory) { h.failures++; failures = h.failures })
	return failures
}

// setLastError records why the last create failed.
func (m *memory) setLastError(n types.NamespacedName, why cause) {
	m.creates.update(n, func(h *createHistory) { h.lastError = &why })
}

// lastError returns why the last create failed, or nil.
func (m *memory) lastError(n types.NamespacedName) *cause { return m.creates.get(n).lastError }

// createSucceeded clears the history.
func (m *memory) createSucceeded(n types.NamespacedName) { m.creates.forget(n) }

// exclude keeps the sandbox from being placed on an agent for a while.
func (m *memory) exclude(n types.NamespacedName, agentUID string, d time.Duration) {
	until := m.clock.Now().Add(d)
	m.creates.update(n, func(h *createHistory) {
		if h.excluded == nil {
			h.excluded = map[string]time.Time{}
		}
		h.excluded[agentUID], h.failures = until, 0
	})
}

// excluded returns the agents on which the sandbox must not be placed.
func (m *memory) excluded(n types.NamespacedName) []string {
	var out []string
	now := m.clock.Now()
	m.creates.update(n, func(h *createHistory) {
		for uid, until := range h.excluded {
			if now.Before(until) {
				out = append(out, uid)
			} else {
				delete(h.excluded, uid)
			}
		}
	})
	return out
}

// agentSilent records that the agent did not answer, and returns for how long it has not.
func (m *memory) agentSilent(n types.NamespacedName) time.Duration {
	now := m.clock.Now()
	since := now
	m.silences.update(n, func(t *time.Time) {
		if t.IsZero() {
			*t = now
		}
		since = *t
	})
	return now.Sub(since)
}

// agentAnswered records that the agent answers.
func (m *memory) agentAnswered(n types.NamespacedName) { m.silences.forget(n) }

// stale reports whether a Sandbox with the resource version was already overwritten by this process, so that the cache that
// shows it is outdated.
func (m *memory) stale(n types.NamespacedName, version string) bool {
	stale := m.versions.get(n)[version]
	if !stale {
		m.versions.forget(n)
	}
	return stale
}

// overwritten records that this process has overwritten a resource version.
func (m *memory) overwritten(n types.NamespacedName, version string) {
	m.versions.update(n, func(v *map[string]bool) {
		next := map[string]bool{version: true} // a new map: get returns the old one
		for old := range *v {
			next[old] = true
		}
		*v = next
	})
}

// table maps sandboxes to values. The zero table is empty. It may be used concurrently.
type table[T any] struct {
	mu     sync.Mutex
	values map[types.NamespacedName]*T
}

// get returns the value of a sandbox, or the zero value.
func (t *table[T]) get(n types.NamespacedName) T {
	t.mu.Lock()
	defer t.mu.Unlock()
	if v := t.values[n]; v != nil {
		return *v
	}
	var zero T
	return zero
}

// update changes the value of a sandbox, which is the zero value at first.
func (t *table[T]) update(n types.NamespacedName, change func(*T)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.values == nil {
		t.values = map[types.NamespacedName]*T{}
	}
	v := t.values[n]
	if v == nil {
		v = new(T)
		t.values[n] = v
	}
	change(v)
}

// forget removes the value of a sandbox.
func (t *table[T]) forget(n types.NamespacedName) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.values, n)
}
