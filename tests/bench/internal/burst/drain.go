package burst

import (
	"context"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/mesh"
	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/wait"
)

// drainSeries are the creates that empty a pool of its slots.
const drainSeries = "drain"

// drain has all slots of a pool claimed at once, and measures how fast they come back while nothing else runs. The agent has room
// for as many slots again.
func (s *suite) drain(ctx context.Context) error {
	if s.Refill == 0 {
		return nil
	}
	kept, err := s.Open(ctx, mesh.Pool{Name: pool, Places: 2 * s.Refill, Slots: &s.Refill})
	if err != nil {
		return err
	}
	if err := wait.For(ctx, idleTime); err != nil {
		return err
	}
	b, made, err := s.burst(ctx, drainSeries, s.Refill, kept.Free, s.Refill)
	if err != nil {
		return err
	}
	if err := s.refill(ctx, &b, kept.Wanted); err != nil {
		return err
	}
	s.drained = &b
	s.Say("%d of %d slots were missing; refilled %.1f a second", b.Missing, kept.Wanted, b.Refill)
	for _, x := range made {
		if err := s.AskDelete(ctx, x); err != nil {
			return err
		}
	}
	return s.Remove(ctx, pool)
}
