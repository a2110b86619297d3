package create_test

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
)

// TestCallerLeaves ends the caller's context between any two steps of a fast create, by a cancellation and by a deadline. Nothing
// of the sandbox stays, and an agent that may have received the create receives a delete.
func TestCallerLeaves(t *testing.T) {
	tests := map[string]struct {
		change  func(*sandboxv1.CreateSandboxRequest)
		arrange func(e *env, leave func())
		// waiting is set if the create waits for the clock when its caller leaves.
		waiting bool
		deletes int
	}{
		"before all": {arrange: func(_ *env, leave func()) { leave() }},
		"while the pool is looked up": {
			change: func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Pool = "elsewhere" },
			arrange: func(e *env, leave func()) {
				e.api.Before(func(fakeapi.Verb, client.Object) error { leave(); return context.Canceled })
			},
		},
		"while another has the name": {arrange: func(e *env, _ func()) {
			unlock, err := e.names.Lock(context.Background(), one)
			require.NoError(e.t, err)
			e.t.Cleanup(unlock)
		}, waiting: true},
		"while a deletion has the name": {arrange: func(e *env, _ func()) {
			gone := theirs()
			gone.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
			e.store.SetResource(gone)
		}, waiting: true},
		"between the reservation and the call": {arrange: func(e *env, leave func()) { e.fleet.reserved = leave }, deletes: 1},
		"before the agent admits it": {arrange: func(e *env, _ func()) {
			e.replaceClients(func(c agentv1.AgentServiceClient) agentv1.AgentServiceClient { return &mute{AgentServiceClient: c} })
		}, waiting: true, deletes: 1},
		"while the agent creates it":               {arrange: func(e *env, leave func()) { e.agents["a"].OnCreate = untilLeft(leave, true) }, deletes: 1},
		"and the agent starts it nevertheless":     {arrange: func(e *env, leave func()) { e.agents["a"].OnCreate = untilLeft(leave, false) }, deletes: 1},
		"between the start and the agent's answer": {arrange: func(e *env, leave func()) { e.agents["a"].OnStarted = untilLeft(leave, false) }, deletes: 1},
		"at the agent, which then refuses by itself": {arrange: func(e *env, leave func()) {
			e.agents["a"].OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
				leave()
				return fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full")
			}
		}, deletes: -1},
	}
	for end, reason := range map[error]fault.Reason{context.Canceled: fault.Cancelled, context.DeadlineExceeded: fault.DeadlineExceeded} {
		for name, test := range tests {
			t.Run(string(reason)+" "+name, func(t *testing.T) {
				e := newEnv(t, 5, 0)
				ctx := endingWith(end)
				test.arrange(e, ctx.end)
				done := e.begin(ctx, request(test.change))
				if test.waiting {
					e.await("it waits", func() bool { return e.clock.HasWaiters() && (test.deletes == 0 || e.allocated() == 1) })
					require.Empty(t, done)
					ctx.end()
				}
				r := <-done
				require.Equal(t, reason, fault.ReasonOf(r.err), "%v", r.err)
				require.ErrorIs(t, r.err, end)
				if test.deletes >= 0 { // otherwise the agent's answer and the caller's end race
					e.until("what may be there is deleted", func() bool { return e.deletes() == test.deletes })
				}
				if sb := theirs(); test.waiting && test.deletes == 0 {
					e.store.RemoveResource(sb)
					require.Zero(t, e.creates()+e.allocated())
					require.Zero(t, e.persist.Pending())
					return // the name is the other's
				}
				e.requireNothing()
			})
		}
	}
}

// untilLeft is an agent's part of a create at which the caller leaves. It then fails, or succeeds as if it had noticed too late.
func untilLeft(leave func(), fail bool) func(context.Context, *agentv1.SandboxRecord) error {
	return func(ctx context.Context, _ *agentv1.SandboxRecord) error {
		leave()
		<-ctx.Done()
		if fail {
			return ctx.Err()
		}
		return nil
	}
}

// TestStrongCallerLeaves does the same for a strong create: its custom resource is rolled back.
func TestStrongCallerLeaves(t *testing.T) {
	tests := map[string]struct {
		arrange func(e *env, leave func())
		written bool // it leaves after the custom resource was written
	}{
		"before all": {func(_ *env, leave func()) { leave() }, false},
		"while the custom resource is written": {func(e *env, leave func()) {
			e.api.After(once(fakeapi.Create, func(client.Object) error { leave(); return nil }))
		}, false},
		"while the answer to the write is lost": {func(e *env, leave func()) {
			e.api.After(once(fakeapi.Create, func(client.Object) error { leave(); return context.Canceled }))
		}, false},
		"while the API server is away": {func(e *env, leave func()) {
			e.api.Before(once(fakeapi.Create, func(client.Object) error { leave(); return fakeapi.Refused() }))
		}, false},
		"while it waits for the start": {func(*env, func()) {}, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			ctx := endingWith(context.Canceled)
			test.arrange(e, ctx.end)
			done := e.begin(ctx, request(strong))
			if test.written {
				e.until("the custom resource is written", func() bool { return e.resource("one") != nil })
				ctx.end()
			}
			r := e.end(done)
			require.Equal(t, fault.Cancelled, fault.ReasonOf(r.err), "%v", r.err)
			e.requireNothing()
		})
	}
}

// TestTakeoverDuringStrongCreate: a leader that was stalled finds that another has resumed its create, and leaves the custom
// resource to it.
func TestTakeoverDuringStrongCreate(t *testing.T) {
	e := newEnv(t)
	ctx := endingWith(context.Canceled)
	done := e.begin(ctx, request(strongWithID))
	e.until("the custom resource is written", func() bool { return e.resource("one") != nil })
	sb := e.resource("one")
	sb.Annotations[v1alpha1.AnnotationResumed] = "true"
	require.NoError(t, e.api.Direct.Update(t.Context(), sb))
	ctx.end()
	r := e.end(done)
	require.Equal(t, fault.Cancelled, fault.ReasonOf(r.err))
	require.True(t, fault.IsUnsettled(r.err), "the other may answer")
	e.until("it has ended", func() bool { return !e.recovery.Abandoned(sb) })
	require.Nil(t, e.resource("one").DeletionTimestamp)
	require.Empty(t, e.resource("one").Annotations[v1alpha1.AnnotationAbandoned])
}
