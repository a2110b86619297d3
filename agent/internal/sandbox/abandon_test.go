package sandbox_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/sandbox"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// stuckEnv is a manager whose runtime, until release is closed, does not return from creates, also after their contexts have ended.
type stuckEnv struct {
	*testEnv

	clock   *clocktesting.FakeClock
	entered chan struct{}
	release chan struct{}
}

func newStuckEnv(t *testing.T, op fake.Op) *stuckEnv {
	t.Helper()
	env := &stuckEnv{clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), entered: make(chan struct{}, 8), release: make(chan struct{})}
	env.testEnv = newEnv(t, func(c *sandbox.Config) { c.Clock, c.CreateTimeout = env.clock, time.Second })
	env.runtime.Hook(func(_ context.Context, at fake.Op, _ string) error {
		if at == op {
			env.entered <- struct{}{}
			<-env.release
		}
		return nil
	})
	return env
}

// createAll begins creates on all capacity units of the agent, which do not return. Each sends its error.
func (env *stuckEnv) createAll(ctx context.Context, t *testing.T) chan error {
	t.Helper()
	errs := make(chan error, 3)
	for i := range 3 {
		go func() {
			_, err := env.create(ctx, record(fmt.Sprintf("u%d", i), 1, ports(int32(8000+i))))
			errs <- err
		}()
	}
	for range 3 {
		select {
		case <-env.entered:
		case err := <-errs:
			t.Fatalf("a create ended before it entered the runtime: %v", err)
		}
	}
	return errs
}

// abandon lets the time pass that a create has after its deadline.
func (env *stuckEnv) abandon(t *testing.T, errs chan error) (all []error) {
	t.Helper()
	require.Eventually(t, func() bool {
		env.clock.Step(10 * time.Second)
		for len(errs) > 0 {
			all = append(all, <-errs)
		}
		return len(all) == 3
	}, testkit.Timeout, testkit.Tick, "a create does not end")
	return all
}

func TestAbandonedCreateGivesUpItsCapacity(t *testing.T) {
	for _, op := range []fake.Op{fake.OpImage, fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(op), func(t *testing.T) {
			env := newStuckEnv(t, op)
			if op == fake.OpImage {
				env.runtime.SetImage("docker.io/library/busybox:1", fake.Image{})
			}
			for _, err := range env.abandon(t, env.createAll(t.Context(), t)) {
				requireFault(t, err, context.DeadlineExceeded, fault.DeadlineExceeded)
			}
			require.Len(t, env.reports(), 3, "what is left is listed")
			for _, r := range env.reports() {
				require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, r.GetState())
				require.Equal(t, string(fault.DeadlineExceeded), r.GetReason())
				require.NotNil(t, r.GetFinishTime(), "the allocator counts nothing for it, whatever its state")
			}
			require.NoError(t, env.DropVanished(t.Context()))
			require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, env.state("u0"), "it has not vanished")
			env.runtime.Hook(nil)
			env.runtime.SetImage("docker.io/library/busybox:1", fake.Image{Local: true})
			for i := range 3 {
				env.mustCreate(t, record(fmt.Sprintf("next%d", i), 1, ports(int32(8000+i))))
			}
			_, err := env.create(t.Context(), record("more", 1))
			requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)

			close(env.release)
			require.Eventually(t, func() bool { return len(env.reports()) == 3 }, testkit.Timeout, testkit.Tick, "what they left is removed")
			require.Len(t, env.runtime.IDs(), 3)
			_, err = env.create(t.Context(), record("more", 1))
			requireFault(t, err, errdefs.ErrResourceExhausted, fault.NoCapacity)
		})
	}
}

// TestAbandonedAttemptIsNotRepeated checks that no other create uses what the removal of an abandoned one will remove.
func TestAbandonedAttemptIsNotRepeated(t *testing.T) {
	env := newStuckEnv(t, fake.OpCreate)
	env.abandon(t, env.createAll(t.Context(), t))
	env.runtime.Hook(nil)
	for attempt := range int64(2) {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_, err := env.create(ctx, record("u0", attempt+1))
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	close(env.release)
	env.mustCreate(t, record("u0", 1))
	require.Eventually(t, func() bool { return len(env.reports()) == 1 }, testkit.Timeout, testkit.Tick)
}

// TestAbandonedCreateCanBeDeleted has callers that leave, and deletes while the creates do not return.
func TestAbandonedCreateCanBeDeleted(t *testing.T) {
	env := newStuckEnv(t, fake.OpTask)
	ctx, leave := context.WithCancel(t.Context())
	errs := env.createAll(ctx, t)
	leave()
	for _, err := range env.abandon(t, errs) {
		require.ErrorIs(t, err, context.Canceled)
	}
	deleted := make(chan error, 3)
	for i := range 3 {
		go func() {
			_, _, err := env.delete(context.Background(), record(fmt.Sprintf("u%d", i), 1).GetFence(), 0)
			deleted <- err
		}()
	}
	require.Eventually(t, func() bool { return env.state("u2") == agentv1.SandboxState_SANDBOX_STATE_TERMINATING }, testkit.Timeout, testkit.Tick)
	for _, r := range env.reports() {
		require.NotNil(t, r.GetFinishTime())
	}
	close(env.release)
	for range 3 {
		require.NoError(t, <-deleted)
	}
	env.requireNothing(t)
}
