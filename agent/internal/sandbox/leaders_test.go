package sandbox_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

// under returns the context of a call under a term.
func under(ctx context.Context, term int64) context.Context {
	return metadata.NewIncomingContext(ctx, metadata.Pairs(rpc.TermKey, strconv.FormatInt(term, 10)))
}

// hold blocks a call of the runtime until release is closed; reached is closed when a call is blocked.
func hold(env *testEnv, at fake.Op) (reached, release chan struct{}) {
	reached, release = make(chan struct{}), make(chan struct{})
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op != at {
			return nil
		}
		select {
		case <-reached:
		default:
			close(reached)
		}
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
		return nil
	})
	return reached, release
}

func TestSupersededCallsChangeNothing(t *testing.T) {
	env := newEnv(t, nil)
	env.Supersede("", 5)
	env.Supersede("", 3) // terms never decrease
	fence := record("u", 1).GetFence()
	for _, ctx := range []context.Context{t.Context(), under(t.Context(), 4)} {
		_, err := env.create(ctx, record("u", 1))
		requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	}
	_, err := env.create(under(t.Context(), 5), record("u", 1))
	require.NoError(t, err)
	_, _, err = env.delete(under(t.Context(), 4), fence, 0)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	requireFault(t, env.MarkPersisted(under(t.Context(), 4), fence), errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	requireFault(t, env.ForgetTombstone(under(t.Context(), 4), fence), errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	_, err = env.Drain(under(t.Context(), 4), agentUID, false)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	require.Equal(t, stateRunning, env.state("u"))
	require.False(t, env.reports()[0].GetPersisted())
	require.True(t, env.Accepting())
	_, _, err = env.Log(t.Context(), fence)
	require.NoError(t, err, "reading logs changes nothing")
	env.Supersede("controller", 9)
	require.NoError(t, env.MarkPersisted(under(t.Context(), 5), fence), "each kind of leader has its own term")
}

func TestSupersedeCancelsCreatesThatHaveNotStarted(t *testing.T) {
	for _, at := range []fake.Op{fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(at), func(t *testing.T) {
			env := newEnv(t, nil)
			reached, _ := hold(env, at)
			old := make(chan error, 1)
			go func() { _, err := env.create(under(context.Background(), 4), record("u", 1)); old <- err }()
			<-reached
			env.Supersede("", 5)
			requireFault(t, <-old, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
			env.requireNothing(t)
			env.runtime.Hook(nil)
			_, err := env.create(under(t.Context(), 5), record("u", 1))
			require.NoError(t, err, "the new leader can create it again")
		})
	}
}

func TestSupersedeKeepsRunningAndSharedCreates(t *testing.T) {
	env := newEnv(t, nil)
	_, err := env.create(under(t.Context(), 4), record("old", 1))
	require.NoError(t, err)
	reached, release := hold(env, fake.OpCreate)
	answers := make(chan error, 2)
	for _, term := range []int64{4, 6} {
		go func() { _, err := env.create(under(context.Background(), term), record("u", 1)); answers <- err }()
	}
	<-reached
	require.Eventually(t, func() bool { return env.Waiting("u") == 2 }, testkit.Timeout, testkit.Tick)
	env.Supersede("", 5)
	require.Equal(t, 1, env.Waiting("u"))
	close(release)
	for range 2 {
		require.NoError(t, <-answers)
	}
	require.Equal(t, stateRunning, env.state("old"))
	require.Equal(t, stateRunning, env.state("u"))
}

// TestNewLeaderRetriesCanceledCreate retries a create while the takeover cancels it.
func TestNewLeaderRetriesCanceledCreate(t *testing.T) {
	env := newEnv(t, nil)
	undoing, goOn := make(chan struct{}), make(chan struct{})
	reached := make(chan struct{})
	first := true // the creates call the hook one after the other
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		switch {
		case op == fake.OpTask && first:
			first = false
			close(reached)
			<-ctx.Done()
			return ctx.Err()
		case op == fake.OpDelete:
			close(undoing)
			<-goOn
		}
		return nil
	})
	old, next := make(chan error, 1), make(chan error, 1)
	go func() { _, err := env.create(under(context.Background(), 4), record("u", 1)); old <- err }()
	<-reached
	env.Supersede("", 5)
	<-undoing
	go func() { _, err := env.create(under(context.Background(), 5), record("u", 1)); next <- err }()
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, env.state("u"))
	close(goOn)
	requireFault(t, <-old, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	require.NoError(t, <-next)
	require.Equal(t, stateRunning, env.state("u"))
}

// TestCanceledCreateReportsReason: the reason shows that the request is not at fault, and what canceled the create.
func TestCanceledCreateReportsReason(t *testing.T) {
	for want, end := range map[fault.Reason]func(env *testEnv, leave func()){
		fault.Cancelled:        func(_ *testEnv, leave func()) { leave() },
		fault.LeaderSuperseded: func(env *testEnv, _ func()) { env.Supersede("", 5) },
	} {
		t.Run(string(want), func(t *testing.T) {
			env := newEnv(t, nil)
			reached, _ := hold(env, fake.OpCreate)
			watcher, err := env.status.Watch()
			require.NoError(t, err)
			defer env.status.Unwatch(watcher)
			ctx, leave := context.WithCancel(under(context.Background(), 4))
			defer leave()
			answer := make(chan error, 1)
			go func() { _, err := env.create(ctx, record("u", 1)); answer <- err }()
			<-reached
			end(env, leave)
			require.Error(t, <-answer)
			for {
				r := (<-watcher.Deltas()).GetSandboxes()[0]
				if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_FAILED {
					require.Equal(t, string(want), r.GetReason())
					require.Contains(t, r.GetMessage(), "the create was canceled")
					break
				}
				require.NotEqual(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATED, r.GetState(), "FAILED was not reported")
			}
		})
	}
}
