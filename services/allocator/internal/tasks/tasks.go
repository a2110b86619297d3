// Package tasks owns background work that outlives the call that began it. It starts nothing outside of Run and
// waits for everything before Run returns. Go may be called concurrently, before, during and after Run.
package tasks

import (
	"context"
	"sync"
)

// Set is a set of tasks.
type Set struct {
	mu      sync.Mutex
	pending []func(context.Context)
	wake    chan struct{}
	ended   bool
}

// New returns a set in which nothing runs yet.
func New() *Set { return &Set{wake: make(chan struct{}, 1)} }

// Go makes Run run f, now or once Run is called. After Run has returned f is dropped: the next process must be able to
// recover what it was for. f must return soon after its context has ended.
func (s *Set) Go(f func(context.Context)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	s.pending = append(s.pending, f)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run runs the tasks, each in its own goroutine, until ctx ends and all have returned.
func (s *Set) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		select {
		case <-ctx.Done():
			s.mu.Lock()
			defer s.mu.Unlock()
			s.ended, s.pending = true, nil
			return nil
		case <-s.wake:
		}
		s.mu.Lock()
		batch := s.pending
		s.pending = nil
		s.mu.Unlock()
		for _, f := range batch {
			wg.Go(func() { f(ctx) })
		}
	}
}
