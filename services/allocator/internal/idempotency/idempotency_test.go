package idempotency_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var key = idempotency.Key{Namespace: "ns", RequestID: "r1"} //nolint:gochecknoglobals // a constant

func answers(value string) func(*string) (string, error) {
	return func(prior *string) (string, error) {
		if prior != nil {
			return "again: " + *prior, nil
		}
		return value, nil
	}
}

func TestAnswersAreRemembered(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Now())
	tests := map[string]struct {
		key    idempotency.Key
		digest string
		after  time.Duration
		want   string
		reason fault.Reason
	}{
		"the same request":         {key, "d", 0, "again: first", ""},
		"just before it ends":      {key, "d", idempotency.TTL - time.Second, "again: first", ""},
		"too late":                 {key, "d", idempotency.TTL + time.Second, "second", ""},
		"another request":          {key, "e", 0, "", fault.RequestIDReused},
		"another namespace":        {idempotency.Key{Namespace: "other", RequestID: "r1"}, "d", 0, "second", ""},
		"no request_id, no memory": {idempotency.Key{Namespace: "ns"}, "d", 0, "second", ""},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			calls := idempotency.New[string](clock)
			for _, k := range []idempotency.Key{key, {Namespace: "ns"}} {
				first, shared, err := calls.Do(t.Context(), k, "d", answers("first"))
				require.NoError(t, err)
				require.Equal(t, "first", first)
				require.False(t, shared)
			}
			clock.Step(test.after)
			got, _, err := calls.Do(t.Context(), test.key, test.digest, answers("second"))
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.Equal(t, test.want, got)
		})
	}
}

func TestErrorsAreNotRemembered(t *testing.T) {
	calls := idempotency.New[string](clocktesting.NewFakeClock(time.Now()))
	_, _, err := calls.Do(t.Context(), key, "d", func(*string) (string, error) { return "", errors.New("no") })
	require.EqualError(t, err, "no")
	got, _, err := calls.Do(t.Context(), key, "e", answers("yes"))
	require.NoError(t, err, "nothing was answered, so the id is free")
	require.Equal(t, "yes", got)
}

// start begins a call that runs until it is released with its result.
func start(calls *idempotency.Calls[string]) (release chan error, ended chan error) {
	release, ended = make(chan error), make(chan error, 1)
	running := make(chan struct{})
	go func() {
		_, _, err := calls.Do(context.Background(), key, "d", func(*string) (string, error) {
			close(running)
			return "first", <-release
		})
		ended <- err
	}()
	<-running
	return release, ended
}

// announcing is a context that announces that a call has begun to wait for it.
type announcing struct {
	context.Context //nolint:containedctx // it is one
	once            sync.Once
	waits           chan struct{}
}

func (a *announcing) Done() <-chan struct{} {
	a.once.Do(func() { close(a.waits) })
	return a.Context.Done()
}

func TestRepetitionsWaitForTheFirstCall(t *testing.T) {
	tests := map[string]struct {
		err    error
		want   string
		shared bool
	}{
		"it succeeds":         {nil, "first", true},
		"it fails":            {errors.New("no"), "", false},
		"its caller leaves":   {fmt.Errorf("left: %w", context.Canceled), "second", false},
		"its deadline passes": {fmt.Errorf("late: %w", context.DeadlineExceeded), "second", false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			calls := idempotency.New[string](clocktesting.NewFakeClock(time.Now()))
			release, ended := start(calls)
			running, prior := calls.Peek(key)
			require.True(t, running)
			require.Nil(t, prior)
			_, _, err := calls.Do(t.Context(), key, "e", answers("other"))
			require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))
			type result struct {
				got    string
				shared bool
				err    error
			}
			second := make(chan result, 1)
			ctx := &announcing{Context: context.Background(), waits: make(chan struct{})}
			go func() {
				got, shared, err := calls.Do(ctx, key, "d", answers("second"))
				second <- result{got, shared, err}
			}()
			<-ctx.waits
			release <- test.err
			require.ErrorIs(t, <-ended, test.err)
			r := <-second
			require.Equal(t, test.want, r.got)
			require.Equal(t, test.shared, r.shared)
			if test.want == "" {
				require.ErrorIs(t, r.err, test.err)
			} else {
				require.NoError(t, r.err)
			}
		})
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	calls := idempotency.New[string](clocktesting.NewFakeClock(time.Now()))
	release, ended := start(calls)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := calls.Do(ctx, key, "d", answers("second"))
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, fault.IsUnsettled(err), "the first call may still succeed")
	release <- nil
	require.NoError(t, <-ended)
	running, prior := calls.Peek(key)
	require.False(t, running)
	require.Equal(t, "first", *prior)
}

func TestPanicLetsTheNextCallRun(t *testing.T) {
	calls := idempotency.New[string](clocktesting.NewFakeClock(time.Now()))
	require.Panics(t, func() { _, _, _ = calls.Do(t.Context(), key, "d", func(*string) (string, error) { panic("bug") }) })
	got, _, err := calls.Do(t.Context(), key, "d", answers("second"))
	require.NoError(t, err)
	require.Equal(t, "second", got)
}

func TestMemoryIsBounded(t *testing.T) {
	calls := idempotency.New[string](clocktesting.NewFakeClock(time.Now()))
	for i := range idempotency.Limit + 1 {
		_, _, err := calls.Do(t.Context(), idempotency.Key{Namespace: "ns", RequestID: fmt.Sprint(i)}, "d", answers("x"))
		require.NoError(t, err)
	}
	_, oldest := calls.Peek(idempotency.Key{Namespace: "ns", RequestID: "0"})
	_, newest := calls.Peek(idempotency.Key{Namespace: "ns", RequestID: fmt.Sprint(idempotency.Limit)})
	require.Nil(t, oldest)
	require.NotNil(t, newest)
}

func TestDigest(t *testing.T) {
	require.Equal(t, idempotency.Digest(map[string]int{"a": 1, "b": 2}), idempotency.Digest(map[string]int{"b": 2, "a": 1}))
	require.NotEqual(t, idempotency.Digest("a"), idempotency.Digest("b"))
	require.Len(t, idempotency.Digest("a"), 32)
}
