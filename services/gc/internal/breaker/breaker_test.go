package breaker_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Unix(1_700_000_000, 0) //nolint:gochecknoglobals // a constant

func TestShareWithinWindow(t *testing.T) {
	b := breaker.New(breaker.Limit{Share: 0.5, Window: time.Minute, Floor: 3})
	objects := 10
	for range 5 {
		require.NoError(t, b.Allow(start, breaker.Intent{Objects: objects}))
		objects--
	}
	err := b.Allow(start, breaker.Intent{Objects: objects})
	require.ErrorContains(t, err, "exceed 5 of 10 objects")
	require.Equal(t, err, b.Tripped())
	require.Equal(t, err, b.Allow(start.Add(time.Hour), breaker.Intent{Objects: 1000}), "the breaker stays open")
}

func TestWindowSlides(t *testing.T) {
	b := breaker.New(breaker.Limit{Share: 0.1, Window: time.Minute})
	for i := range 100 {
		require.NoError(t, b.Allow(start.Add(time.Duration(i)*7*time.Second), breaker.Intent{Objects: 100}), i)
	}
	require.NoError(t, b.Allow(start, breaker.Intent{Objects: 100}), "a clock that goes back")
}

func TestFloorIsAlwaysPermitted(t *testing.T) {
	b := breaker.New(breaker.Limit{Share: 0.01, Window: time.Minute, Floor: 4})
	for range 4 {
		require.NoError(t, b.Allow(start, breaker.Intent{Objects: 1}))
	}
	require.Error(t, b.Allow(start, breaker.Intent{Objects: 1}))
}

func TestQueuedDeletionsCount(t *testing.T) {
	limit := breaker.Limit{Share: 0.5, Window: time.Minute}
	doomed := func(n int) func() int { return func() int { return n } }
	b := breaker.New(limit)
	require.NoError(t, b.Allow(start, breaker.Intent{Objects: 100, Waiting: 50, Doomed: func() int { panic("not asked") }}))
	require.NoError(t, b.Allow(start, breaker.Intent{Objects: 100, Waiting: 90, Doomed: doomed(20)}), "most queued items are no deletions")
	require.ErrorContains(t, b.Allow(start, breaker.Intent{Objects: 100, Waiting: 90, Doomed: doomed(60)}), "2 deletions within 1m0s, with 60 more queued")
}

func TestNoLimit(t *testing.T) {
	b := breaker.New(breaker.Limit{Share: 1, Window: time.Minute})
	for range 100 {
		require.NoError(t, b.Allow(start, breaker.Intent{Objects: 1, Waiting: 99, Doomed: func() int { return 99 }}))
	}
}

// TestNeverPermitsMoreThanLimit within any window, and never refuses what is below a smaller limit.
func TestNeverPermitsMoreThanLimit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const objects, floor = 1000, 20
		b := breaker.New(breaker.Limit{Share: 0.01, Window: 16 * time.Second, Floor: floor})
		var made []time.Time
		now := start
		for range rapid.IntRange(1, 200).Draw(t, "deletions") {
			now = now.Add(time.Duration(rapid.IntRange(0, 3000).Draw(t, "ms")) * time.Millisecond)
			within := func(window time.Duration) (n int) {
				for _, when := range made {
					if now.Sub(when) < window {
						n++
					}
				}
				return n
			}
			if b.Allow(now, breaker.Intent{Objects: objects}) != nil {
				require.GreaterOrEqual(t, within(16*time.Second)+1, floor)
				return
			}
			made = append(made, now)
			require.LessOrEqual(t, within(15*time.Second), floor)
		}
	})
}
