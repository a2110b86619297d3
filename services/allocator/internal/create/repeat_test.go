package create_test

import (
	"context"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
)

// TestRepetition is about a second call with the request_id of an answered one: after what happened in between, and with what it
// asks for.
func TestRepetition(t *testing.T) {
	tests := map[string]struct {
		between func(e *env, uid string)
		change  func(*sandboxv1.CreateSandboxRequest)
		reason  fault.Reason // empty: it is answered again
	}{
		"the same":                  {},
		"without the name":          {change: func(r *sandboxv1.CreateSandboxRequest) { r.Name = "" }},
		"another name":              {change: func(r *sandboxv1.CreateSandboxRequest) { r.Name = "two" }, reason: fault.RequestIDReused},
		"another command":           {change: func(r *sandboxv1.CreateSandboxRequest) { r.Spec.Args = []string{"x"} }, reason: fault.RequestIDReused},
		"other labels":              {change: func(r *sandboxv1.CreateSandboxRequest) { r.Labels = map[string]string{"a": "b"} }, reason: fault.RequestIDReused},
		"it is being deleted":       {between: func(e *env, uid string) { e.store.MarkDeleting(one, uid) }, reason: fault.SandboxTerminating},
		"it was deleted":            {between: func(e *env, uid string) { require.True(e.t, e.store.MarkGone(one, uid)) }, reason: fault.SandboxTerminating},
		"it has expired since":      {between: func(e *env, _ string) { e.clock.Step(time.Hour) }},
		"its pool is gone since":    {between: func(e *env, _ string) { e.pools.Remove(&v1alpha1.SandboxPool{ObjectMeta: poolMeta()}) }},
		"no agent is ready by now":  {between: func(e *env, _ string) { e.clients.set("a", nil) }},
		"the queue is full by now":  {between: func(e *env, _ string) { e.fillQueue() }},
		"another has the name then": {between: func(e *env, uid string) { require.True(e.t, e.store.MarkGone(one, uid)); e.store.SetResource(theirs()) }, reason: fault.SandboxTerminating},
	}
	for name, test := range tests {
		for memory, restart := range map[string]bool{"remembered": false, "after a restart": true} {
			t.Run(name+" "+memory, func(t *testing.T) {
				e := newEnv(t, 5)
				req := request(func(r *sandboxv1.CreateSandboxRequest) {
					withID(r)
					r.Spec.ExpireTime = timestamppb.New(e.clock.Now().Add(time.Minute))
				})
				first, err := e.create(t.Context(), req)
				require.NoError(t, err)
				if restart {
					e.restart()
					if test.reason == "" {
						e.adopted(first.GetSandbox().GetUid())
					}
				}
				if test.between != nil {
					test.between(e, first.GetSandbox().GetUid())
				}
				again := proto.CloneOf(req)
				if test.change != nil {
					test.change(again)
				}
				response, err := e.create(t.Context(), again)
				require.Equal(t, test.reason, fault.ReasonOf(err), "%v", err)
				require.Equal(t, 1, e.creates())
				if test.reason == "" {
					require.True(t, response.GetReplayed())
					require.False(t, first.GetReplayed(), "the first answer is not changed")
					require.Equal(t, first.GetSandbox().GetUid(), response.GetSandbox().GetUid())
					require.Equal(t, first.GetConsistencyMode(), response.GetConsistencyMode())
					require.Equal(t, first.GetStartPath(), response.GetStartPath())
				}
			})
		}
	}
}

// TestRepetitionOfWrittenSandbox: after the custom resource is written, that is what the next leader knows of the request.
func TestRepetitionOfWrittenSandbox(t *testing.T) {
	e := newEnv(t, 5)
	req := request(withID)
	first, err := e.create(t.Context(), req)
	require.NoError(t, err)
	e.until("it is written", func() bool { return e.resource("one") != nil && !e.persist.Owns(first.GetSandbox().GetUid()) })
	e.setStatus(running)
	e.restart()
	e.sync()
	response, err := e.create(t.Context(), req)
	require.NoError(t, err)
	require.True(t, response.GetReplayed())
	require.Equal(t, first.GetSandbox().GetUid(), response.GetSandbox().GetUid())
	_, err = e.create(t.Context(), request(func(r *sandboxv1.CreateSandboxRequest) { withID(r); r.Spec.Args = []string{"x"} }))
	require.Equal(t, fault.RequestIDReused, fault.ReasonOf(err))
}

// TestRepetitionWhileItRuns shares the one execution.
func TestRepetitionWhileItRuns(t *testing.T) {
	e := newEnv(t, 5)
	proceed := make(chan struct{})
	e.script(func(ctx context.Context, _ *agentv1.SandboxRecord) error {
		select {
		case <-proceed:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	first := e.begin(t.Context(), request(withID))
	e.await("it is under way", func() bool { return e.creates() == 1 })
	others := []chan result{e.begin(t.Context(), request(withID)), e.begin(t.Context(), request(withID))}
	reused := <-e.begin(t.Context(), request(strongWithID))
	require.Equal(t, fault.RequestIDReused, fault.ReasonOf(reused.err))
	close(proceed)
	want := (<-first).response.GetSandbox().GetUid()
	for _, done := range others {
		r := <-done
		require.NoError(t, r.err)
		require.True(t, r.response.GetReplayed())
		require.Equal(t, want, r.response.GetSandbox().GetUid())
	}
	require.Equal(t, 1, e.creates())
}

// TestRepetitionOfFailedCreate begins again: errors are not remembered.
func TestRepetitionOfFailedCreate(t *testing.T) {
	e := newEnv(t, 5)
	e.script(func(_ context.Context, _ *agentv1.SandboxRecord) error {
		if e.creates() == 1 {
			return fault.New(errdefs.ErrNotFound, fault.ImageNotFound, "no")
		}
		return nil
	})
	_, err := e.create(t.Context(), request(withID))
	require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
	response, err := e.create(t.Context(), request(withID))
	require.NoError(t, err)
	require.False(t, response.GetReplayed())
}

// TestReportIsNoAnswerYet: a container that a former leader started, and that may yet be deleted, answers no repetition.
func TestReportIsNoAnswerYet(t *testing.T) {
	tests := map[string]struct {
		arrange func(e *env, fence *agentv1.Fence)
		reason  fault.Reason
	}{
		"nothing can happen to it": {func(e *env, fence *agentv1.Fence) { e.adopted(fence.GetSandboxUid()) }, ""},
		"its agent may be lost":    {func(*env, *agentv1.Fence) {}, fault.APIUnavailable},
		"its agent would obey a former one": {func(e *env, _ *agentv1.Fence) {
			e.announced = false
		}, fault.AgentUnavailable},
		"this process has it deleted": {func(e *env, fence *agentv1.Fence) {
			e.agents["a"].OnDelete = func(context.Context, *agentv1.Fence) error { return errdefs.ErrUnavailable }
			e.deletions.Container(fence)
		}, fault.AgentUnavailable},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			former := newEnv(t, 5)
			first, err := former.create(t.Context(), request(withID))
			require.NoError(t, err)
			report := former.agents["a"].Sandboxes()[0]
			e := newEnv(t, 5)
			e.agents["a"].Put(report)
			e.report("a")
			test.arrange(e, report.GetRecord().GetFence())
			response, err := e.create(t.Context(), request(withID))
			require.Equal(t, test.reason, fault.ReasonOf(err))
			if test.reason == "" {
				require.Equal(t, first.GetSandbox().GetUid(), response.GetSandbox().GetUid())
			} else {
				require.True(t, fault.IsUnsettled(err))
			}
			require.Zero(t, e.creates())
		})
	}
}

// TestRequestIsSeenLate: the informer shows the former leader's custom resource of the same request between the look for one and
// the lock of the name.
func TestRequestIsSeenLate(t *testing.T) {
	e := newEnv(t)
	sb := e.cutOff()
	require.NoError(t, e.api.Direct.Create(t.Context(), &v1alpha1.SandboxPool{ObjectMeta: poolMeta()}))
	e.pools.Remove(&v1alpha1.SandboxPool{ObjectMeta: poolMeta()})
	e.api.Before(once(fakeapi.Get, func(client.Object) error { e.store.SetResource(sb); return nil })) // in the lookup of the pool
	done := e.begin(t.Context(), request(strongWithID))
	e.setStatus(running)
	r := e.end(done)
	require.NoError(t, r.err)
	require.True(t, r.response.GetReplayed())
	require.Equal(t, string(sb.UID), r.response.GetSandbox().GetUid())
}
