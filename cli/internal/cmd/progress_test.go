package cmd_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/cli/internal/cmd"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// TestProgress lets a create take two seconds of a fake clock: the terminal shows the progress, and the line is erased.
func TestProgress(t *testing.T) {
	w := newLiveAllocator(0)
	f := w.fake()
	finish := make(chan struct{})
	f.create = func(ctx context.Context, in *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
		<-finish
		return w.create(ctx, in)
	}
	b := start(t, f)
	fakeClock := clocktesting.NewFakeClock(now)
	var out, err buffer
	done := make(chan int, 1)
	go func() {
		done <- cmd.Main(t.Context(), cmd.Env{
			Name: "fsb-ctl", In: strings.NewReader(""), Out: &out, Err: &err, Terminal: true, Clock: fakeClock, Setup: setup,
			Getenv: func(name string) string { return b.env[name] },
		}, []string{"run", "web", "--image", "img", "-q"})
	}()
	require.Eventually(t, func() bool {
		if fakeClock.HasWaiters() {
			fakeClock.Step(200 * time.Millisecond)
		}
		return strings.Contains(err.String(), "starting img ... 2s")
	}, testkit.Timeout, testkit.Tick)
	close(finish)
	require.Zero(t, <-done)
	require.NotContains(t, err.String(), "... 0s", "nothing within the first second")
	require.True(t, strings.HasSuffix(err.String(), "\r\x1b[K"), "%q", err.String())
	require.Equal(t, "web\n", out.String())
}
