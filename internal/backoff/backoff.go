// Package backoff repeats calls with delays that grow exponentially, on a clock that tests can set. The delays are those
// of github.com/cenkalti/backoff (randomized by half, growing by 1.5), whose own retry loop takes the wall clock. A Backoff
// belongs to one goroutine; Retry may be called concurrently.
package backoff

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"
	"k8s.io/utils/clock"
)

// Policy bounds the delays of a repeated call.
type Policy struct {
	// Initial is the first delay, before it is randomized; Max is the longest.
	Initial, Max time.Duration
}

// Backoff is a sequence of growing delays.
type Backoff struct {
	clock  clock.Clock
	delays *backoff.ExponentialBackOff
}

// New returns the sequence that begins with p.Initial.
func New(c clock.Clock, p Policy) *Backoff {
	delays := backoff.NewExponentialBackOff()
	delays.InitialInterval, delays.MaxInterval = p.Initial, p.Max
	delays.Reset()
	return &Backoff{clock: c, delays: delays}
}

// Reset begins the sequence again, after a success.
func (b *Backoff) Reset() { b.delays.Reset() }

// Next returns the next delay and advances the sequence, for callers that schedule by themselves.
func (b *Backoff) Next() time.Duration { return b.delays.NextBackOff() }

// Wait blocks for the next delay. It returns ctx's error, at once, when ctx ends first or has ended.
func (b *Backoff) Wait(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timer := b.clock.NewTimer(b.Next())
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}

// permanent marks an error that ends Retry.
type permanent struct{ error }

func (p permanent) Unwrap() error { return p.error }

// Permanent returns err such that Retry returns it at once; nil for nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return permanent{err}
}

// Retry calls f until it returns nil or a Permanent error, which is returned without its mark, or until ctx ends: then f's
// last error is returned, joined with ctx's. f is called at least once.
func Retry(ctx context.Context, c clock.Clock, p Policy, f func(ctx context.Context) error) error {
	delays := New(c, p)
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		if marked := (permanent{}); errors.As(err, &marked) {
			return marked.error
		}
		if ended := delays.Wait(ctx); ended != nil {
			return errors.Join(ended, err)
		}
	}
}
