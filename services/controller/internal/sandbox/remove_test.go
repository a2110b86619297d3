package sandbox

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func removedResponse() []*agentv1.DeleteSandboxResponse {
	return []*agentv1.DeleteSandboxResponse{{Stage: agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT}, {Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED}}
}

func (f *fixture) remover() *remover {
	deletes := f.calls()
	return &remover{deleter: &deleter{agents: f.access(), calls: deletes, metrics: f.metrics}, allocator: f.allocator, creates: f.calls(), deletes: deletes,
		writer: f.writer(), timing: timing}
}

func TestRemoveForADeletion(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.deleted = removedResponse()
	r := f.remover()
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseTerminating), deleted, withGrace(7)))
	p, err := r.remove(t.Context(), x, lifecycle.DeleteRequested)
	require.NoError(t, err)
	require.False(t, p.done)
	require.True(t, p.removing)
	require.Equal(t, "Terminating", p.cause.reason)
	require.Equal(t, timing.DeletionPoll, p.requeue)
	require.NoError(t, waitIdle(t, r.deletes).err)
	req := f.agents.service.deleteRequests()[0]
	require.Equal(t, fence, identity.FenceOf(req.GetFence()))
	require.Equal(t, 7*time.Second, req.GetGracePeriod().AsDuration())

	p, err = r.remove(t.Context(), x, lifecycle.DeleteRequested)
	require.NoError(t, err)
	require.True(t, p.done)
	require.Equal(t, lifecycle.AgentTerminated, p.next)
	require.Len(t, f.agents.service.deleteRequests(), 1)
}

func TestRemoveCancelsARunningCreate(t *testing.T) {
	f := newFixture(t, agentPod())
	r := f.remover()
	startedCall := make(chan struct{})
	r.creates.start(t.Context(), name, fence, "", blockingCall(startedCall, nil))
	<-startedCall
	_, err := r.remove(t.Context(), targetOf(t, newSandbox(onAgent, deleted)), lifecycle.DeleteRequested)
	require.NoError(t, err)
	_, ok := r.creates.get(name, fence)
	require.False(t, ok)
}

func TestRemoveWithoutThePod(t *testing.T) {
	f := newFixture(t)
	f.agents.service.gate = make(chan struct{})
	r := f.remover()
	p, err := r.remove(t.Context(), targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseTerminating), deleted)), lifecycle.DeleteRequested)
	require.NoError(t, err)
	require.True(t, p.done)
	require.Equal(t, lifecycle.AgentTerminated, p.next)
	require.Empty(t, f.agents.service.deleteRequests(), "there is no agent to ask")
}

// TestRemoveWithAnotherGracePeriod: the running call is replaced, because the agent waits for the old one.
func TestRemoveWithAnotherGracePeriod(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.gate = make(chan struct{})
	r := f.remover()
	remove := func(grace int64) {
		t.Helper()
		_, err := r.remove(t.Context(), targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseTerminating), deleted, withGrace(grace))), lifecycle.DeleteRequested)
		require.NoError(t, err)
	}
	requests := func(n int) []*agentv1.DeleteSandboxRequest {
		t.Helper()
		require.Eventually(t, func() bool { return len(f.agents.service.deleteRequests()) >= n }, testkit.Timeout, testkit.Tick)
		return f.agents.service.deleteRequests()
	}
	remove(60)
	require.Equal(t, time.Minute, requests(1)[0].GetGracePeriod().AsDuration())
	remove(60)
	remove(1)
	require.Len(t, requests(2), 2)
	require.Equal(t, time.Second, requests(2)[1].GetGracePeriod().AsDuration())
}

func TestFailedRemovalIsRetried(t *testing.T) {
	f := newFixture(t, agentPod())
	f.agents.service.callErr = errUnreachable
	r := f.remover()
	x := targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseTerminating), deleted))
	remove := func() progress {
		t.Helper()
		p, err := r.remove(t.Context(), x, lifecycle.DeleteRequested)
		require.NoError(t, err)
		waitIdle(t, r.deletes)
		return p
	}
	remove()
	p := remove()
	require.Equal(t, "AgentUnreachable", p.blocked.reason)
	require.Len(t, f.agents.service.deleteRequests(), 1, "not before the interval")
	x.now = start.Add(timing.DeletionPoll)
	remove()
	require.Len(t, f.agents.service.deleteRequests(), 2)
}

func TestRemovalBlocked(t *testing.T) {
	x := targetOf(t, newSandbox(onAgent, deleted))
	late, long := start.Add(-timing.Requeue), start.Add(-time.Hour)
	for _, tt := range []struct {
		name string
		call outcome
		want string
	}{
		{"just started", outcome{running: true, started: start, first: start}, ""},
		{"no answer", outcome{running: true, started: late, first: late}, "AgentUnreachable"},
		{"in its grace period", outcome{running: true, started: long, first: long, stage: "SIGTERM_SENT"}, ""},
		{"started again", outcome{running: true, started: start, first: long}, "AgentUnreachable"},
		{"unavailable", outcome{err: errUnreachable}, "AgentUnreachable"},
		{"timed out", outcome{err: context.DeadlineExceeded}, "AgentUnreachable"},
		{"canceled", outcome{err: context.Canceled}, "AgentUnreachable"},
		{"superseded", outcome{err: failure(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded)}, ""},
		{"failed", outcome{err: failure(errdefs.ErrUnknown, fault.Internal)}, "RemoveFailed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := removalBlocked(x, tt.call, timing)
			if tt.want == "" {
				require.Nil(t, got)
				return
			}
			require.Equal(t, tt.want, got.reason)
			require.Contains(t, got.message, "agent agent-1")
		})
	}
}

func TestRemovalResult(t *testing.T) {
	x := targetOf(t, newSandbox(onAgent))
	for event, want := range map[lifecycle.Event]string{
		lifecycle.DeleteRequested: "Terminating", lifecycle.ExpireTimePassed: "Expiring", lifecycle.ResetRequested: "Resetting",
	} {
		got := removalResult(x, event)
		require.True(t, got.removing)
		require.Equal(t, want, got.cause.reason)
	}
	require.Equal(t, result{}, removalResult(x, lifecycle.AgentRefused), "a refusal has its own cause")
}

func TestRelease(t *testing.T) {
	f := newFixture(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseRunning), func(s *v1alpha1.Sandbox) {
		s.Labels = map[string]string{v1alpha1.LabelNode: "node-1", "team": "red"}
		s.Status.AssignedPod = "agent-1"
	}))
	r := f.remover()
	r.deletes.recordFailure(name, fence, errUnreachable)
	x := f.target()
	p, err := r.release(t.Context(), x)
	require.NoError(t, err)
	require.True(t, p.done)
	require.Equal(t, []identity.Fence{fence}, f.allocator.released())
	require.Nil(t, x.assignment)
	require.Empty(t, x.sandbox.Status.AssignedPod)
	require.NotContains(t, f.get().Annotations, v1alpha1.AnnotationAssignment)
	require.Equal(t, map[string]string{"team": "red"}, f.get().Labels)
	_, ok := r.deletes.get(name, fence)
	require.False(t, ok)
}

// TestReleaseWaitsForTheStatus: the attempt, and a failure, have to be written before the assignment is cleared.
func TestReleaseWaitsForTheStatus(t *testing.T) {
	for _, tt := range []struct {
		name    string
		base    []change
		change  change
		release bool
	}{
		{"attempt not written", []change{onAgent, func(s *v1alpha1.Sandbox) { s.Status.Attempt = 0 }}, nil, false},
		{"failure not written", []change{onAgent, inPhase(v1alpha1.PhaseRunning)}, inPhase(v1alpha1.PhaseFailed), false},
		{"failure written", []change{onAgent, inPhase(v1alpha1.PhaseFailed)}, nil, true},
		{"written", []change{onAgent, inPhase(v1alpha1.PhaseRunning)}, nil, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, newSandbox(tt.base...))
			x := f.target()
			if tt.change != nil {
				tt.change(x.sandbox)
			}
			p, err := f.remover().release(t.Context(), x)
			require.NoError(t, err)
			require.Equal(t, tt.release, p.done)
			require.Equal(t, tt.release, len(f.allocator.released()) == 1)
			require.Equal(t, tt.release, p.requeue == 0)
		})
	}
}

func TestReleaseWithoutTheAllocator(t *testing.T) {
	f := newFixture(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseRunning)))
	f.allocator.err = errUnreachable
	_, err := f.remover().release(t.Context(), f.target())
	require.ErrorContains(t, err, "releasing reservation")
	p, err := f.remover().release(t.Context(), targetOf(t, newSandbox(onAgent, deleted)))
	require.NoError(t, err)
	require.True(t, p.done, "a deletion does not wait for the allocator")
	f.allocator.err = failure(errdefs.ErrNotFound, fault.SandboxNotFound)
	p, err = f.remover().release(t.Context(), f.target())
	require.NoError(t, err)
	require.True(t, p.done, "it is released already")
}

func TestReleaseOfAnUnassignedSandbox(t *testing.T) {
	f := newFixture(t)
	p, err := f.remover().release(t.Context(), targetOf(t, newSandbox(deleted)))
	require.NoError(t, err)
	require.True(t, p.done)
	require.Empty(t, f.allocator.released())
}

func TestRemoveStale(t *testing.T) {
	f := newFixture(t)
	f.agents.service.gate = make(chan struct{})
	stale := report(runningState)
	stale.Record.Fence.AgentUid = "old"
	staleFence := identity.Fence{SandboxUID: "uid", Attempt: 1, AgentUID: "old"}
	f.registry.reports[staleFence] = stale
	r := f.remover()
	current := targetOf(t, newSandbox(func(s *v1alpha1.Sandbox) {
		a := assigned
		a.Attempt = 2
		s.SetAssignment(&a)
	}))
	require.Zero(t, r.removeStale(t.Context(), current).requeue)
	call, ok := r.deletes.get(name, staleFence)
	require.True(t, ok)
	require.True(t, call.running)

	r.removeStale(t.Context(), targetOf(t, newSandbox(onAgent)))
	_, ok = r.deletes.get(name, fence)
	require.False(t, ok, "the container of the current attempt is not stale")
	stale.State = terminating
	r.deletes.drop(name, staleFence)
	r.removeStale(t.Context(), current)
	_, ok = r.deletes.get(name, staleFence)
	require.False(t, ok, "it is being removed already")
}

func TestStaleRemovalIsRetriedAfterTheInterval(t *testing.T) {
	f := newFixture(t)
	stale := report(runningState)
	f.registry.reports[fence] = stale
	r := f.remover()
	r.deletes.recordFailure(name, fence, errUnreachable)
	x := targetOf(t, newSandbox(func(s *v1alpha1.Sandbox) { s.Status.Attempt = 1 }))
	require.Equal(t, timing.DeletionPoll, r.removeStale(t.Context(), x).requeue)
	_, ok := r.deletes.get(name, fence)
	require.False(t, ok)
}

func TestDeleteOn(t *testing.T) {
	refused := failure(errdefs.ErrFailedPrecondition, fault.FenceMismatch)
	for _, tt := range []struct {
		name   string
		agents *fakeAgents
		grace  *time.Duration
		check  func(error) bool
	}{
		{"removed", &fakeAgents{service: &fakeAgent{deleted: removedResponse()}}, ptr.To(time.Minute), nil},
		{"removed, then broken", &fakeAgents{service: &fakeAgent{deleted: removedResponse(), streamErr: refused}}, nil, nil},
		{"no connection", &fakeAgents{service: &fakeAgent{}, dialErr: errUnreachable}, nil, errdefs.IsUnavailable},
		{"refused", &fakeAgents{service: &fakeAgent{callErr: refused}}, nil, errdefs.IsFailedPrecondition},
		{"broken", &fakeAgents{service: &fakeAgent{streamErr: refused}}, nil, errdefs.IsFailedPrecondition},
		{"early end", &fakeAgents{service: &fakeAgent{deleted: removedResponse()[:1]}}, nil, func(err error) bool { return errors.Is(err, io.ErrUnexpectedEOF) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := deleteOn(t.Context(), tt.agents, "address", fence, tt.grace, func(string) {})
			if tt.check != nil {
				require.True(t, tt.check(err), "%v", err)
				return
			}
			require.NoError(t, err)
			got := tt.agents.service.deleteRequests()[0].GetGracePeriod()
			require.Equal(t, tt.grace == nil, got == nil, "unset: that of the record")
			if tt.grace != nil {
				require.Equal(t, *tt.grace, got.AsDuration())
			}
		})
	}
}
