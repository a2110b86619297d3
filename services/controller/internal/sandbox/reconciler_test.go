package sandbox

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// reconciler returns the whole reconciler, with the Registry not read yet. It is not started.
func (f *fixture) reconciler() *Reconciler {
	f.t.Helper()
	r, err := New(Config{Client: f.client, Live: f.client, Allocator: f.allocator, Agents: f.agents, Index: agents.NewIndex(f.clock), Recorder: f.recorder,
		Clock: f.clock, Timing: timing, Workers: 1, Metrics: prometheus.NewRegistry()})
	require.NoError(f.t, err)
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan error, 2)
	go func() { done <- r.background.Start(ctx) }()
	go func() { done <- r.changed.Start(ctx) }()
	f.t.Cleanup(func() { cancel(); require.NoError(f.t, <-done); require.NoError(f.t, <-done) })
	return r
}

func (f *fixture) reconcile(r *Reconciler) reconcile.Result {
	f.t.Helper()
	got, err := r.Reconcile(f.t.Context(), reconcile.Request{NamespacedName: name})
	require.NoError(f.t, err)
	return got
}

func TestReconcileOfANewSandbox(t *testing.T) {
	f := newFixture(t, newSandbox(func(s *v1alpha1.Sandbox) { s.Finalizers = nil }), newPool())
	f.allocator.response = placed(fence, "node-1")
	f.agents.service.created = []*agentv1.CreateSandboxResponse{started(report(runningState))}
	r := f.reconciler()
	f.reconcile(r)
	s := f.get()
	require.Equal(t, v1alpha1.PhaseBound, s.Status.Phase)
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer)
	require.Equal(t, "pool", s.Status.Pool)
	require.Equal(t, "agent-1", s.Status.AssignedPod)
	require.Equal(t, int64(1), s.Status.Attempt)
	waitIdle(t, r.creates)
	f.reconcile(r)
	require.Equal(t, v1alpha1.PhaseRunning, f.get().Status.Phase)
	require.Equal(t, "uid-1", f.get().Status.SandboxID)
	require.Equal(t, []string{"Normal Bound attempt 1 is assigned to agent agent-1", "Normal Running container uid-1 runs on node node-1"}, f.recorder.all())
}

func TestReconcileOfADeletion(t *testing.T) {
	f := newFixture(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseRunning)))
	require.NoError(t, f.client.Delete(t.Context(), f.get()))
	r := f.reconciler()
	f.reconcile(r) // the agent's Pod does not exist
	require.True(t, apierrors.IsNotFound(f.client.Get(t.Context(), name, &v1alpha1.Sandbox{})))
	require.Len(t, f.allocator.released(), 1)
	require.Zero(t, f.reconcile(r), "it is removed")
}

func TestAssignmentThatCannotBeDecoded(t *testing.T) {
	f := newFixture(t, newSandbox(inPhase(v1alpha1.PhaseRunning), withAnnotation(v1alpha1.AnnotationAssignment, "{")))
	require.NoError(t, f.client.Delete(t.Context(), f.get()))
	got := f.reconcile(f.reconciler())
	require.Equal(t, timing.Requeue, got.RequeueAfter)
	s := f.get()
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer, "a container may be running")
	c := meta.FindStatusCondition(s.Status.Conditions, v1alpha1.ConditionReady)
	require.Equal(t, "AssignmentInvalid", c.Reason)
	require.Len(t, f.recorder.all(), 1)
}

func TestDeletedSandboxWithoutTheFinalizer(t *testing.T) {
	f := newFixture(t, newSandbox(onAgent, func(s *v1alpha1.Sandbox) { s.Finalizers = []string{"other/finalizer"} }))
	require.NoError(t, f.client.Delete(t.Context(), f.get()))
	require.Zero(t, f.reconcile(f.reconciler()))
	require.Empty(t, f.get().Status.Phase, "nothing is written")
}

func TestOutdatedCacheIsReadAgain(t *testing.T) {
	f := newFixture(t, newSandbox(inPhase(v1alpha1.PhaseRunning), onAgent))
	r := f.reconciler()
	r.memory.overwritten(name, f.get().ResourceVersion)
	require.Equal(t, cacheDelay, f.reconcile(r).RequeueAfter)
	require.Empty(t, f.get().Status.Pool, "nothing is written")
}

func TestConflictIsRetried(t *testing.T) {
	f := newFixture(t, newSandbox(inPhase(v1alpha1.PhasePending)), newPool())
	conflict := apierrors.NewConflict(v1alpha1.GroupVersion.WithResource("sandboxes").GroupResource(), "s", errors.New("changed"))
	f.client = interceptor.NewClient(asWatch(t, f.client), interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return conflict
		}})
	f.allocator.response = placed(fence, "node-1")
	require.Equal(t, cacheDelay, f.reconcile(f.reconciler()).RequeueAfter)
}

func TestErrorOfTheAPIServerIsReturned(t *testing.T) {
	f := newFixture(t, newSandbox(func(s *v1alpha1.Sandbox) { s.Finalizers = nil }))
	broken := errors.New("no etcd")
	f.client = interceptor.NewClient(asWatch(t, f.client), interceptor.Funcs{
		Patch: func(context.Context, client.WithWatch, client.Object, client.Patch, ...client.PatchOption) error {
			return broken
		}})
	_, err := f.reconciler().Reconcile(t.Context(), reconcile.Request{NamespacedName: name})
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, err, "adding finalizer")
}

// TestErrorKeepsTheLoss: if the pool cannot be read, the condition AgentLost stays.
func TestErrorKeepsTheLoss(t *testing.T) {
	f := newFixture(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseRunning), withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable"),
		func(s *v1alpha1.Sandbox) { s.Spec.PoolRef = "" }))
	broken := errors.New("no etcd")
	f.client = interceptor.NewClient(asWatch(t, f.client), interceptor.Funcs{
		Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			if _, ok := o.(*corev1.Namespace); ok {
				return broken
			}
			return c.Get(ctx, key, o, opts...)
		}})
	_, err := f.reconciler().Reconcile(t.Context(), reconcile.Request{NamespacedName: name})
	require.ErrorIs(t, err, broken)
	require.True(t, meta.IsStatusConditionTrue(f.get().Status.Conditions, v1alpha1.ConditionAgentLost))
}

func TestUnknownAction(t *testing.T) {
	f := newFixture(t)
	_, err := f.reconciler().act(t.Context(), targetOf(t, newSandbox()), lifecycle.Accepted, []lifecycle.Action{"Dance"}, nil)
	require.ErrorContains(t, err, `unknown action "Dance"`)
}

func TestAcceptReset(t *testing.T) {
	f := newFixture(t)
	x := targetOf(t, newSandbox(crashedSandbox, resetAt(time.Second)))
	p, err := f.reconciler().act(t.Context(), x, lifecycle.ResetRequested, []lifecycle.Action{lifecycle.AcceptReset}, nil)
	require.NoError(t, err)
	require.True(t, p.done)
	require.False(t, x.resetRequested())
	require.Nil(t, x.sandbox.Status.ExitCode)
	require.Nil(t, x.sandbox.Status.FinishTime)
}

func TestInitialResetRevisionIsNoReset(t *testing.T) {
	f := newFixture(t, newSandbox(resetAt(0)), newPool())
	f.allocator.err = errUnreachable
	f.reconcile(f.reconciler())
	require.True(t, f.get().Status.AcceptedResetRevision.Time.Equal(start))
}

func TestTTLChanges(t *testing.T) {
	minute := func(p *v1alpha1.SandboxPool) { p.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Minute} }
	hour := func(p *v1alpha1.SandboxPool) { p.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Hour} }
	p := ttlChanges()
	require.True(t, p.Update(event.UpdateEvent{ObjectOld: newPool(minute), ObjectNew: newPool(hour)}))
	require.True(t, p.Update(event.UpdateEvent{ObjectOld: newPool(minute), ObjectNew: newPool()}))
	require.False(t, p.Update(event.UpdateEvent{ObjectOld: newPool(minute), ObjectNew: newPool(minute)}))
	require.False(t, p.Update(event.UpdateEvent{ObjectOld: newPool(), ObjectNew: newPool()}))
	require.False(t, p.Create(event.CreateEvent{Object: newPool(minute)}))
	require.False(t, onlyDeletes().Create(event.CreateEvent{Object: agentPod()}))
	require.False(t, onlyDeletes().Update(event.UpdateEvent{ObjectOld: agentPod(), ObjectNew: agentPod()}))
	require.True(t, onlyDeletes().Delete(event.DeleteEvent{Object: agentPod()}))
}

// asWatch returns the fake client as the interceptor needs it.
func asWatch(t *testing.T, c client.Client) client.WithWatch {
	t.Helper()
	w, ok := c.(client.WithWatch)
	require.True(t, ok)
	return w
}
