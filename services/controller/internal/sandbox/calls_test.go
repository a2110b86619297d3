package sandbox

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// blockingCall returns a call that reports a stage and then waits for its context or for release.
func blockingCall(started, release chan struct{}) callFunc {
	return func(ctx context.Context, stage func(string)) (*agentv1.SandboxReport, error) {
		stage("STAGE")
		close(started)
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-release:
			return &agentv1.SandboxReport{ContainerId: "c"}, nil
		}
	}
}

func TestCallRunsInTheBackground(t *testing.T) {
	f := newFixture(t)
	c := f.calls()
	_, ok := c.get(name, fence)
	require.False(t, ok)
	started, release := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	c.start(ctx, name, fence, "args", blockingCall(started, release))
	cancel() // the call outlives the reconcile
	<-started
	got, ok := c.get(name, fence)
	require.True(t, ok)
	require.Equal(t, outcome{running: true, started: start, first: start, args: "args", stage: "STAGE"}, got)

	c.start(t.Context(), name, fence, "other", func(context.Context, func(string)) (*agentv1.SandboxReport, error) {
		panic("a second call on the container")
	})
	f.clock.Step(time.Second)
	close(release)
	require.Equal(t, name, <-f.notified)
	got, _ = c.get(name, fence)
	require.False(t, got.running)
	require.Equal(t, "c", got.report.GetContainerId())
	require.Equal(t, start.Add(time.Second), got.ended)
}

func TestDroppedCallIsCanceled(t *testing.T) {
	f := newFixture(t)
	c := f.calls()
	started := make(chan struct{})
	c.start(t.Context(), name, fence, "", blockingCall(started, nil))
	<-started
	c.drop(name, fence)
	require.Equal(t, name, <-f.notified)
	_, ok := c.get(name, fence)
	require.False(t, ok)

	f.clock.Step(time.Minute)
	failed := errors.New("failed")
	c.start(t.Context(), name, fence, "", func(context.Context, func(string)) (*agentv1.SandboxReport, error) { return nil, failed })
	<-f.notified
	got, _ := c.get(name, fence)
	require.ErrorIs(t, got.err, failed)
	require.Equal(t, start, got.first, "the time of the first call is kept")
	c.finish(name, fence)
	require.Equal(t, start.Add(time.Minute), c.recordFailure(name, fence, failed).first, "finish forgets it")
}

func TestRecordFailure(t *testing.T) {
	f := newFixture(t)
	c := f.calls()
	theirs := errors.New("of another process")
	got := c.recordFailure(name, fence, theirs)
	require.Equal(t, outcome{started: start, first: start, ended: start, err: theirs}, got)
	require.Equal(t, got, c.recordFailure(name, fence, errors.New("again")), "a call is not replaced")
}

func TestForgetCancelsAllCallsOfASandbox(t *testing.T) {
	f := newFixture(t)
	c := f.calls()
	second := fence
	second.Attempt = 2
	for _, k := range []struct {
		sandbox string
		attempt int64
	}{{"s", 1}, {"s", 2}, {"other", 1}} {
		n, fc := name, fence
		n.Name, fc.Attempt = k.sandbox, k.attempt
		started := make(chan struct{})
		c.start(t.Context(), n, fc, "", blockingCall(started, nil))
		<-started
	}
	c.forget(name)
	require.Equal(t, name, <-f.notified)
	require.Equal(t, name, <-f.notified)
	_, ok := c.get(name, second)
	require.False(t, ok)
	got, ok := c.get(other, fence)
	require.True(t, ok)
	require.True(t, got.running)
}

func TestBackgroundStops(t *testing.T) {
	b := newBackground()
	require.True(t, b.NeedLeaderElection())
	ctx, cancel := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- b.Start(ctx) }()
	ended := make(chan struct{})
	_, ok := b.run(t.Context(), func(ctx context.Context) { <-ctx.Done(); close(ended) })
	require.True(t, ok)
	cancel()
	require.NoError(t, <-stopped)
	select {
	case <-ended:
	default:
		t.Fatal("Start did not wait for the goroutine")
	}
	_, ok = b.run(t.Context(), func(context.Context) { t.Error("started after the end") })
	require.False(t, ok)

	c := newCalls(newFixture(t).clock, b, nil)
	c.start(t.Context(), name, fence, "", nil)
	_, ok = c.get(name, fence)
	require.False(t, ok)
}

// waitIdle waits until a call has ended.
func waitIdle(t *testing.T, c *calls) outcome {
	t.Helper()
	var got outcome
	require.Eventually(t, func() bool {
		o, ok := c.get(name, fence)
		got = o
		return ok && !o.running
	}, testkit.Timeout, testkit.Tick)
	return got
}
