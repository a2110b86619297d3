// Package keylock orders all work on one key: one of the callers that lock a key holds it, and the others wait in the order
// in which they came. It keeps memory only for keys that are locked. All methods may be called concurrently.
package keylock

import (
	"context"
	"sync"
)

// Map is a set of locks, one for each key.
type Map[K comparable] struct {
	mu    sync.Mutex
	locks map[K][]chan struct{} // a present key is locked; the channels are its waiters, in order
}

// New returns a map in which nothing is locked.
func New[K comparable]() *Map[K] { return &Map[K]{locks: map[K][]chan struct{}{}} }

// Lock blocks until the caller holds the key, and returns the function that releases it, to be called once. If ctx ends
// first the error is ctx's and nothing is locked.
func (m *Map[K]) Lock(ctx context.Context, key K) (func(), error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	unlock := sync.OnceFunc(func() { m.unlock(key) })
	m.mu.Lock()
	waiters, locked := m.locks[key]
	if !locked {
		m.locks[key] = nil
		m.mu.Unlock()
		return unlock, nil
	}
	turn := make(chan struct{})
	m.locks[key] = append(waiters, turn)
	m.mu.Unlock()
	select {
	case <-turn:
		return unlock, nil
	case <-ctx.Done():
		m.leave(key, turn)
		return nil, ctx.Err()
	}
}

// leave removes a waiter; one whose turn came in the same moment passes it on.
func (m *Map[K]) leave(key K, turn chan struct{}) {
	m.mu.Lock()
	waiters := m.locks[key]
	for i, w := range waiters {
		if w == turn {
			m.locks[key] = append(waiters[:i:i], waiters[i+1:]...)
			m.mu.Unlock()
			return
		}
	}
	m.mu.Unlock()
	m.unlock(key)
}

func (m *Map[K]) unlock(key K) {
	m.mu.Lock()
	defer m.mu.Unlock()
	waiters := m.locks[key]
	if len(waiters) == 0 {
		delete(m.locks, key)
		return
	}
	m.locks[key] = waiters[1:]
	close(waiters[0])
}
