package auth

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/clock"
)

// Timing says how long an answer of the API server counts.
type Timing struct {
	// Allow and Deny are how long an answer is used without asking again.
	Allow, Deny time.Duration
	// Stale is how long an allowing answer is used while the API server does not answer.
	Stale time.Duration
	// Timeout bounds one question; Pause is how long after one that was not answered stale answers are used without asking.
	Timeout, Pause time.Duration
	// Size bounds the number of allowing answers, and that of others.
	Size int
}

// DefaultTiming returns the defaults.
func DefaultTiming() Timing {
	return Timing{Allow: 10 * time.Second, Deny: 2 * time.Second, Stale: 5 * time.Minute, Timeout: 2 * time.Second, Pause: time.Second, Size: 16 << 10}
}

// answer is one answer of the API server.
type answer[T any] struct {
	value   T
	allowed bool
	at      time.Time
	// until is when the answer ends whatever the API server says; zero for never.
	until time.Time
}

// memory remembers answers of the API server by question.
type memory[T any] struct {
	timing Timing
	clock  clock.PassiveClock
	// Those who are refused must not displace those who are allowed.
	allowed, denied *cache.LRUExpireCache
	flight          singleflight.Group

	mu     sync.Mutex
	failed time.Time // when a question was last not answered
}

func newMemory[T any](t Timing, c clock.PassiveClock) *memory[T] {
	return &memory[T]{timing: t, clock: c, allowed: cache.NewLRUExpireCacheWithClock(t.Size, c), denied: cache.NewLRUExpireCacheWithClock(t.Size, c)}
}

// ask returns the answer to a question: the remembered one while it is fresh, that of the API server, or, if it does not answer,
// an allowing one that is not stale yet. The error is that of the question.
func (m *memory[T]) ask(ctx context.Context, key string, question func(context.Context) (answer[T], error)) (answer[T], error) {
	last, known := m.get(key)
	if known && m.fresh(last) {
		return last, nil
	}
	if known && last.allowed && m.away() {
		return last, nil
	}
	result := m.flight.DoChan(key, func() (any, error) {
		// One caller that leaves must not fail the others.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.timing.Timeout)
		defer cancel()
		a, err := question(ctx)
		m.note(err)
		if err != nil {
			return a, err
		}
		a.at = m.clock.Now()
		m.add(key, a)
		return a, nil
	})
	select {
	case <-ctx.Done():
		return answer[T]{}, ctx.Err()
	case r := <-result:
		if r.Err != nil {
			if known && last.allowed {
				return last, nil
			}
			return answer[T]{}, r.Err
		}
		return r.Val.(answer[T]), nil
	}
}

// knows reports whether the question need not be asked now.
func (m *memory[T]) knows(key string) bool {
	a, ok := m.get(key)
	return ok && (a.allowed || m.fresh(a))
}

// get returns the answer that is remembered and has not ended.
func (m *memory[T]) get(key string) (answer[T], bool) {
	v, ok := m.allowed.Get(key)
	if !ok {
		v, ok = m.denied.Get(key)
	}
	if !ok {
		return answer[T]{}, false
	}
	a := v.(answer[T])
	if !a.until.IsZero() && !m.clock.Now().Before(a.until) {
		return answer[T]{}, false
	}
	return a, true
}

// add remembers the newest answer to a question.
func (m *memory[T]) add(key string, a answer[T]) {
	if a.allowed {
		m.allowed.Add(key, a, max(m.timing.Stale, m.timing.Allow))
		return
	}
	m.allowed.Remove(key)
	m.denied.Add(key, a, m.timing.Deny)
}

func (m *memory[T]) fresh(a answer[T]) bool {
	limit := m.timing.Deny
	if a.allowed {
		limit = m.timing.Allow
	}
	return m.clock.Since(a.at) < limit
}

// away reports whether the API server has just not answered.
func (m *memory[T]) away() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return !m.failed.IsZero() && m.clock.Since(m.failed) < m.timing.Pause
}

func (m *memory[T]) note(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.failed = (time.Time{}); err != nil {
		m.failed = m.clock.Now()
	}
}
