package backoff_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var policy = backoff.Policy{Initial: 100 * time.Millisecond, Max: time.Second}

func TestDelaysGrowToTheMaximum(t *testing.T) {
	b := backoff.New(clock.RealClock{}, policy)
	first := b.Next()
	require.InDelta(t, 100, first.Milliseconds(), 51)
	var last time.Duration
	for range 30 {
		last = b.Next()
		require.LessOrEqual(t, last, 1500*time.Millisecond)
	}
	require.GreaterOrEqual(t, last, 500*time.Millisecond)
	b.Reset()
	require.LessOrEqual(t, b.Next(), 151*time.Millisecond)
}

func TestWaitFollowsTheClock(t *testing.T) {
	fake := clocktesting.NewFakeClock(time.Unix(0, 0))
	b := backoff.New(fake, policy)
	done := make(chan error, 1)
	go func() { done <- b.Wait(t.Context()) }()
	require.Eventually(t, fake.HasWaiters, time.Minute, time.Millisecond)
	select {
	case err := <-done:
		t.Fatalf("Wait returned %v before its delay passed", err)
	default:
	}
	fake.Step(time.Second)
	require.NoError(t, <-done)
}

func TestWaitEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, backoff.New(clocktesting.NewFakeClock(time.Unix(0, 0)), policy).Wait(ctx), context.Canceled)
}

func TestRetry(t *testing.T) {
	failure := errors.New("failure")
	for name, test := range map[string]struct {
		errs  []error
		want  error
		calls int
	}{
		"succeeds at once":     {[]error{nil}, nil, 1},
		"succeeds later":       {[]error{failure, failure, nil}, nil, 3},
		"stops at a permanent": {[]error{failure, backoff.Permanent(failure)}, failure, 2},
		"permanent nil":        {[]error{backoff.Permanent(nil)}, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			err := backoff.Retry(t.Context(), clock.RealClock{}, backoff.Policy{Initial: time.Microsecond, Max: time.Microsecond},
				func(context.Context) error { calls++; return test.errs[calls-1] })
			require.Equal(t, test.want, err)
			require.Equal(t, test.calls, calls)
		})
	}
}

func TestRetryReturnsTheLastErrorWhenItsContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	failure := errors.New("failure")
	err := backoff.Retry(ctx, clocktesting.NewFakeClock(time.Unix(0, 0)), policy, func(context.Context) error {
		cancel()
		return failure
	})
	require.ErrorIs(t, err, failure)
	require.ErrorIs(t, err, context.Canceled)
}
