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
)

// under is the context of a call under a term.
func under(ctx context.Context, term int64) context.Context {
	return metadata.NewIncomingContext(ctx, metadata.Pairs(rpc.TermKey, strconv.FormatInt(term, 10)))
}

// hold keeps creates waiting at a call of the runtime until release is closed; reached is closed when one waits.
func hold(w *world, at fake.Op) (reached, release chan struct{}) {
	reached, release = make(chan struct{}), make(chan struct{})
	w.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
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
	w := newWorld(t, nil)
	w.Supersede("", 5)
	w.Supersede("", 3) // terms never fall
	fence := record("u", 1).GetFence()
	for _, ctx := range []context.Context{t.Context(), under(t.Context(), 4)} {
		_, err := w.create(ctx, record("u", 1))
		requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	}
	_, err := w.create(under(t.Context(), 5), record("u", 1))
	require.NoError(t, err)
	_, _, err = w.delete(under(t.Context(), 4), fence, 0)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	requireFault(t, w.MarkPersisted(under(t.Context(), 4), fence), errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	requireFault(t, w.ForgetTombstone(under(t.Context(), 4), fence), errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	_, err = w.Drain(under(t.Context(), 4), me, false)
	requireFault(t, err, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	require.Equal(t, stateRunning, w.state("u"))
	require.False(t, w.Reports()[0].GetPersisted())
	require.True(t, w.Accepting())
	_, _, err = w.Log(t.Context(), fence)
	require.NoError(t, err, "reading logs changes nothing")
	w.Supersede("controller", 9)
	require.NoError(t, w.MarkPersisted(under(t.Context(), 5), fence), "another kind's term is another's")
}

func TestANewTermEndsCreatesThatHaveNotStarted(t *testing.T) {
	for _, at := range []fake.Op{fake.OpCreate, fake.OpTask, fake.OpStart} {
		t.Run(string(at), func(t *testing.T) {
			w := newWorld(t, nil)
			reached, _ := hold(w, at)
			old := make(chan error, 1)
			go func() { _, err := w.create(under(context.Background(), 4), record("u", 1)); old <- err }()
			<-reached
			w.Supersede("", 5)
			requireFault(t, <-old, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
			w.requireNothing(t)
			w.runtime.Hook(nil)
			_, err := w.create(under(t.Context(), 5), record("u", 1))
			require.NoError(t, err, "the new leader may begin it anew")
		})
	}
}

func TestANewTermLeavesWhatRunsAndWhatOthersWaitFor(t *testing.T) {
	w := newWorld(t, nil)
	_, err := w.create(under(t.Context(), 4), record("old", 1))
	require.NoError(t, err)
	reached, release := hold(w, fake.OpCreate)
	answers := make(chan error, 2)
	for _, term := range []int64{4, 6} {
		go func() { _, err := w.create(under(context.Background(), term), record("u", 1)); answers <- err }()
	}
	<-reached
	require.Eventually(t, func() bool { return w.Waiting("u") == 2 }, patience, tick)
	w.Supersede("", 5)
	require.Equal(t, 1, w.Waiting("u"))
	close(release)
	for range 2 {
		require.NoError(t, <-answers)
	}
	require.Equal(t, stateRunning, w.state("old"))
	require.Equal(t, stateRunning, w.state("u"))
}

// TestTheNewLeaderJoinsACreateThatIsBeingCancelled is the race of a retry with the takeover.
func TestTheNewLeaderJoinsACreateThatIsBeingCancelled(t *testing.T) {
	w := newWorld(t, nil)
	undoing, goOn := make(chan struct{}), make(chan struct{})
	reached := make(chan struct{})
	first := true // the hook is called by one create after the other
	w.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
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
	go func() { _, err := w.create(under(context.Background(), 4), record("u", 1)); old <- err }()
	<-reached
	w.Supersede("", 5)
	<-undoing
	go func() { _, err := w.create(under(context.Background(), 5), record("u", 1)); next <- err }()
	require.Equal(t, agentv1.SandboxState_SANDBOX_STATE_FAILED, w.state("u"))
	close(goOn)
	requireFault(t, <-old, errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)
	require.NoError(t, <-next)
	require.Equal(t, stateRunning, w.state("u"))
}

// TestACancelledCreateBlamesNobody: its report tells that the request is not at fault, and by what it failed.
func TestACancelledCreateBlamesNobody(t *testing.T) {
	for want, end := range map[fault.Reason]func(w *world, leave func()){
		fault.Cancelled:        func(_ *world, leave func()) { leave() },
		fault.LeaderSuperseded: func(w *world, _ func()) { w.Supersede("", 5) },
	} {
		t.Run(string(want), func(t *testing.T) {
			w := newWorld(t, nil)
			reached, _ := hold(w, fake.OpCreate)
			watcher, err := w.Watch()
			require.NoError(t, err)
			defer w.Unwatch(watcher)
			ctx, leave := context.WithCancel(under(context.Background(), 4))
			defer leave()
			answer := make(chan error, 1)
			go func() { _, err := w.create(ctx, record("u", 1)); answer <- err }()
			<-reached
			end(w, leave)
			require.Error(t, <-answer)
			for {
				r := (<-watcher.Deltas()).GetSandboxes()[0]
				if r.GetState() == agentv1.SandboxState_SANDBOX_STATE_FAILED {
					require.Equal(t, string(want), r.GetReason())
					require.Contains(t, r.GetMessage(), "the create was cancelled")
					break
				}
				require.NotEqual(t, agentv1.SandboxState_SANDBOX_STATE_TERMINATED, r.GetState(), "it was never said to have failed")
			}
		})
	}
}
