package rate

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/stat"
)

// rawParallel is how many raw containers are created, started and deleted at a time.
const rawParallel = 2

// Reference is raw containers that were created, started and deleted, in a time.
type Reference struct {
	// Millis is how long each took, its deletion included.
	Millis []float64
	// Used is the CPU time in the time that all of them took.
	Used Usage
}

// PerSecond is how many there were each second.
func (r Reference) PerSecond() float64 {
	return stat.Ratio(float64(len(r.Millis)), r.Used.Wall.Seconds())
}

// reference runs raw containers for a time.
func (s *suite) reference(ctx context.Context, d time.Duration) (Reference, error) {
	if err := s.ready(ctx); err != nil {
		return Reference{}, err
	}
	var mu sync.Mutex
	var r Reference
	worker := func(until time.Time) error {
		for time.Now().Before(until) {
			began := time.Now()
			_, remove, err := s.raw.Run(ctx)
			if err != nil {
				return err
			}
			if err := remove(ctx); err != nil {
				return err
			}
			mu.Lock()
			r.Millis = append(r.Millis, millis(time.Since(began)))
			mu.Unlock()
		}
		return nil
	}
	used, err := s.meter.during(func() error {
		until := time.Now().Add(d)
		errs := make([]error, rawParallel)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = worker(until) })
		}
		wg.Wait()
		return errors.Join(errs...)
	})
	r.Used = used
	return r, err
}

// addReference runs raw containers for the report.
func (s *suite) addReference(ctx context.Context) error {
	r, err := s.reference(ctx, s.Raw)
	if err != nil {
		return err
	}
	s.Say("raw containerd: %.1f a second", r.PerSecond())
	all := &s.result.Raw
	all.Millis, all.Used = append(all.Millis, r.Millis...), all.Used.Add(r.Used)
	return nil
}
