package pool

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/util/workqueue"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

var (
	errConflict = apierrors.NewConflict(schema.GroupResource{Resource: "x"}, "x", errors.New("failed by the test"))
	errAPI      = apierrors.NewInternalError(errors.New("failed by the test"))
)

func waitingSandbox(name string) *v1alpha1.Sandbox {
	return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: poolID.Namespace, Name: name, UID: types.UID(name)}, Spec: v1alpha1.SandboxSpec{PoolRef: poolID.Name}}
}

func TestReconcileCreatesMissingAgents(t *testing.T) {
	for name, tc := range map[string]struct {
		objects []client.Object
		want    int
	}{
		"poolMin":                          {[]client.Object{testPool(poolMin(2))}, 2},
		"some exist":                       {[]client.Object{testPool(poolMin(2)), agentPod("a")}, 1},
		"demand":                           {[]client.Object{testPool(), waitingSandbox("s")}, 1},
		"demand of another pool":           {[]client.Object{testPool(), func() client.Object { s := waitingSandbox("s"); s.Spec.PoolRef = "other"; return s }()}, 0},
		"nothing needed":                   {[]client.Object{testPool()}, 0},
		"a Pod of another owner":           {[]client.Object{testPool(poolMin(1)), agentPod("a", func(p *corev1.Pod) { p.OwnerReferences[0].UID = "other" })}, 1},
		"draining agents have no capacity": {[]client.Object{testPool(poolMin(1)), agentPod("a", drainedFor("maintenance"))}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, tc.objects...)
			f.reconcile()
			require.Equal(t, tc.want, f.api.writes("create Pod"))
		})
	}
}

// A reconcile that reads a cache without the Pods that the last one created creates none again, until the Pods must have been
// deleted.
func TestReconcileExpectsItsOwnPods(t *testing.T) {
	f := newFixture(t, testPool(poolMin(2)))
	f.api.hidden = true
	f.reconcile()
	f.reconcile()
	require.Equal(t, 2, f.api.writes("create Pod"))
	require.EqualValues(t, 2, f.pool().Status.CurrentAgents)
	f.clock.Step(expectationTime + time.Second)
	f.reconcile()
	require.Equal(t, 4, f.api.writes("create Pod"))
}

// A Pod that was deleted, and that the cache still has, is neither counted nor deleted again.
func TestReconcileExpectsItsDeletions(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1)), agentPod("a", drainedFor(v1alpha1.DrainScaleDown)))
	f.expect.deleted(poolID, "a")
	f.reconcile()
	require.Equal(t, 1, f.api.writes("create Pod"))
	require.Zero(t, f.api.writes("delete Pod"))
	require.Empty(t, f.agents.drains)
	require.EqualValues(t, 1, f.pool().Status.CurrentAgents)
}

func TestReconcileReplacesTerminatedPods(t *testing.T) {
	for _, phase := range []corev1.PodPhase{corev1.PodFailed, corev1.PodSucceeded} {
		t.Run(string(phase), func(t *testing.T) {
			f := newFixture(t, testPool(poolMin(1)), agentPod("a", inPhase(phase)))
			f.reconcile()
			require.Equal(t, types.UID("a"), *f.api.deletes["a"].UID)
			require.Equal(t, 1, f.api.writes("create Pod"))
			require.Equal(t, []string{"Normal AgentDeleted deleted agent Pod a: finished"}, f.recorder.take()[:1])
		})
	}
}

func TestReconcileAddsFinalizerBeforePods(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1), func(p *v1alpha1.SandboxPool) { p.Finalizers = nil }))
	f.reconcile()
	require.Equal(t, []string{"patch SandboxPool", "create Pod", "patch status SandboxPool"}, f.api.calls)
	require.Equal(t, []string{v1alpha1.Finalizer}, f.pool().Finalizers)
}

// TestReconcileErrors fails one call of a reconcile that makes all of them.
func TestReconcileErrors(t *testing.T) {
	for call, message := range map[string]string{
		"get SandboxPool":          "reading pool",
		"list Pod":                 "listing agent pods",
		"list Sandbox":             "listing sandboxes",
		"patch SandboxPool":        "writing finalizers",
		"delete Pod":               "deleting agent pod finished",
		"create Pod":               "creating agent pod",
		"patch status SandboxPool": "writing pool status",
	} {
		objects := func() []client.Object {
			return []client.Object{testPool(poolMin(2), func(p *v1alpha1.SandboxPool) { p.Finalizers = nil }), agentPod("finished", inPhase(corev1.PodFailed))}
		}
		t.Run(call+" fails", func(t *testing.T) {
			f := newFixture(t, objects()...)
			f.api.fail[call] = errAPI
			_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
			require.ErrorContains(t, err, message)
			require.ErrorIs(t, err, errAPI)
			delete(f.api.fail, call)
			f.reconcile()
			require.Len(t, f.podNames(), 2, "the next reconcile does not complete it")
		})
		if call == "patch SandboxPool" || call == "patch status SandboxPool" {
			t.Run(call+" conflicts", func(t *testing.T) {
				f := newFixture(t, objects()...)
				f.api.fail[call] = errConflict
				require.Equal(t, 20*time.Millisecond, f.reconcile().RequeueAfter)
			})
		}
	}
}

func TestCreateErrorIsReported(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1)))
	f.api.fail["create Pod"] = errAPI
	_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
	require.Error(t, err)
	require.Contains(t, f.recorder.take()[0], "Warning CreateFailed creating an agent Pod:")
	ready := meta.FindStatusCondition(f.pool().Status.Conditions, v1alpha1.ConditionReady)
	require.Equal(t, "ReconcileFailed", ready.Reason)
	require.Contains(t, ready.Message, "creating agent pod")
}

// An invalid template needs a change of the pool: it is no error, creates nothing, and does not stop drains.
func TestInvalidTemplateStopsCreationOnly(t *testing.T) {
	f := newFixture(t, testPool(poolMin(3), func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.HostNetwork = true }), agentPod("a", drainedFor("maintenance")))
	f.serve("a")
	f.reconcile()
	require.Empty(t, f.podNames(), "the empty draining agent was not deleted")
	require.Zero(t, f.api.writes("create Pod"))
	progressing := meta.FindStatusCondition(f.pool().Status.Conditions, v1alpha1.ConditionProgressing)
	require.Equal(t, metav1.ConditionFalse, progressing.Status)
	require.Equal(t, "InvalidTemplate", progressing.Reason)
	events := f.recorder.take()
	require.Contains(t, events[len(events)-1], "Warning InvalidTemplate spec.agentTemplate.spec.hostNetwork")
	f.reconcile()
	require.Empty(t, f.recorder.take(), "reported again")
}

// A surplus agent is drained after it has been surplus for the delay without interruption.
func TestShrinkWaits(t *testing.T) {
	withBufferMax := func(n int32) func(*v1alpha1.SandboxPool) {
		return func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.BufferMax = n }
	}
	f := newFixture(t, testPool(withBufferMax(0)), agentPod("a"))
	f.serve("a")
	f.agents.sandboxes["a"] = 1 // keeps the Pod once it is drained
	require.Equal(t, shrinkDelay, f.reconcile().RequeueAfter)
	f.clock.Step(shrinkDelay - time.Second)
	require.Equal(t, time.Second, f.reconcile().RequeueAfter)

	setBuffer := func(n int32) {
		p := f.pool()
		p.Spec.Capacity.BufferMax = n
		require.NoError(t, f.client.Update(t.Context(), p))
	}
	setBuffer(100)
	f.reconcile()
	setBuffer(0)
	f.clock.Step(time.Second)
	require.Equal(t, shrinkDelay, f.reconcile().RequeueAfter, "an interruption does not restart the delay")
	require.Empty(t, f.drainReason("a"))

	f.clock.Step(shrinkDelay)
	f.reconcile()
	require.Equal(t, v1alpha1.DrainScaleDown, f.drainReason("a"))
	require.Equal(t, []string{"a"}, f.agents.asked(false))
}

func TestReplacedTemplateDrainsOldAgents(t *testing.T) {
	objects := []client.Object{testPool(poolMin(1), func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMax = 1 }), agentPod("old", outdatedPod)}
	f := newFixture(t, objects...)
	f.index.synced = false
	f.reconcile()
	require.Empty(t, f.drainReason("old"), "drained while the Registry is unknown")

	f.index.synced = true
	f.serve("old")
	f.agents.sandboxes["old"] = 1
	f.reconcile()
	require.Equal(t, v1alpha1.DrainOutdated, f.drainReason("old"))
	require.Equal(t, []string{"Normal AgentDraining agent Pod old accepts no new sandboxes (template-changed) and is deleted when it has none; it has 0"}, f.recorder.take())
}

func TestDrainingAgentIsResumed(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1)), agentPod("a", drainedFor(v1alpha1.DrainScaleDown)))
	f.serve("a")
	f.reconcile()
	require.Equal(t, []string{"a"}, f.agents.asked(true))
	require.Empty(t, f.drainReason("a"))
	require.Equal(t, []string{"Normal AgentResumed agent Pod a accepts sandboxes again"}, f.recorder.take())
	require.Zero(t, f.api.writes("create Pod"))

	t.Run("an agent that does not answer is replaced", func(t *testing.T) {
		f := newFixture(t, testPool(poolMin(1)), agentPod("a", drainedFor(v1alpha1.DrainScaleDown)))
		f.serve("a")
		f.agents.errs["a"] = errRefused
		f.reconcile()
		require.Equal(t, v1alpha1.DrainScaleDown, f.drainReason("a"))
		f.reconcile()
		require.Equal(t, 1, f.api.writes("create Pod"))
	})
	t.Run("the annotation cannot be written", func(t *testing.T) {
		f := newFixture(t, testPool(poolMin(1)), agentPod("a", drainedFor(v1alpha1.DrainScaleDown)))
		f.serve("a")
		f.api.fail["patch Pod"] = errAPI
		_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
		require.ErrorContains(t, err, "resuming agent a")
	})
}

func TestDeletedPoolWaitsForItsAgents(t *testing.T) {
	f := newFixture(t, testPool(beingDeleted, poolMin(2)), agentPod("a"), agentPod("b", drainedFor("maintenance")), agentPod("done", inPhase(corev1.PodFailed)))
	f.serve("a", "b")
	f.agents.sandboxes["a"], f.agents.sandboxes["b"] = 1, 2
	require.Equal(t, requeue, f.reconcile().RequeueAfter)
	require.Equal(t, v1alpha1.DrainPoolDeleted, f.drainReason("a"))
	require.Equal(t, "maintenance", f.drainReason("b"), "the reason of a person was replaced")
	require.Equal(t, []string{"a", "b"}, f.podNames())
	require.Zero(t, f.api.writes("create Pod"), "a pool that is being deleted needs no agents")
	ready := meta.FindStatusCondition(f.pool().Status.Conditions, v1alpha1.ConditionReady)
	require.Equal(t, reasonDeleting, ready.Reason)

	clear(f.agents.sandboxes)
	f.clock.Step(requeue)
	f.reconcile()
	require.Empty(t, f.podNames())
	err := f.client.Get(t.Context(), poolID, &v1alpha1.SandboxPool{})
	require.True(t, apierrors.IsNotFound(err), "the finalizer is not removed: %v", err)
}

func TestDeletedPoolErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		fail    string
		err     error
		objects []client.Object
		message string
		after   time.Duration
	}{
		"a Pod cannot be annotated":       {"patch Pod", errAPI, []client.Object{agentPod("a")}, "draining agent a", 0},
		"a terminated Pod stays":          {"delete Pod", errAPI, []client.Object{agentPod("a", inPhase(corev1.PodFailed))}, "deleting agent pod a", 0},
		"an empty agent stays":            {"delete Pod", errAPI, []client.Object{agentPod("a", drainedFor("x"))}, "deleting agent pod a", 0},
		"the finalizer cannot be removed": {"patch SandboxPool", errAPI, nil, "writing finalizers", 0},
		"the pool has changed":            {"patch SandboxPool", errConflict, nil, "", 20 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, append(tc.objects, testPool(beingDeleted))...)
			f.serve("a")
			f.api.fail[tc.fail] = tc.err
			result, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
			if tc.message != "" {
				require.ErrorContains(t, err, tc.message)
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, tc.after, result.RequeueAfter)
		})
	}
}

func TestForeignFinalizerIsIgnored(t *testing.T) {
	f := newFixture(t, testPool(beingDeleted, func(p *v1alpha1.SandboxPool) { p.Finalizers = []string{"example.com/other"} }), agentPod("a"))
	require.Zero(t, f.reconcile())
	require.Empty(t, f.api.calls)
}

func TestRemovedPoolIsForgotten(t *testing.T) {
	f := newFixture(t)
	f.expect.created(poolID, "a")
	f.idle.update(poolID, []string{"a"})
	f.status.pace.wrote(poolID)
	f.drains.keep(poolID, sets.New[types.UID]("a"))
	f.drains.answered("a", drainResponse{at: start})
	f.pins.keep(poolID, sets.New[types.UID]("a"))
	f.pins.due("a", []string{"x"})
	require.Zero(t, f.reconcile())
	require.Empty(t, f.expect.by)
	require.Empty(t, f.idle.since)
	require.Empty(t, f.status.pace.at)
	require.Empty(t, f.drains.agents)
	require.Empty(t, f.pins.calls)
}

func TestMetricRegistrationError(t *testing.T) {
	f := newFixture(t)
	_, err := New(f.Config) // the registry has the metrics already
	require.ErrorContains(t, err, "registering metrics")
}

func TestSandboxEnqueuesItsPool(t *testing.T) {
	in := func(pool string) *v1alpha1.Sandbox {
		return &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}, Spec: v1alpha1.SandboxSpec{PoolRef: pool}}
	}
	for name, tc := range map[string]struct {
		send func(q queue)
		want []string
	}{
		"created":            {func(q queue) { enqueuePoolOfSandbox().Create(t.Context(), event.CreateEvent{Object: in("a")}, q) }, []string{"a"}},
		"deleted":            {func(q queue) { enqueuePoolOfSandbox().Delete(t.Context(), event.DeleteEvent{Object: in("a")}, q) }, []string{"a"}},
		"without a pool yet": {func(q queue) { enqueuePoolOfSandbox().Create(t.Context(), event.CreateEvent{Object: in("")}, q) }, nil},
		"moved to another pool": {func(q queue) {
			enqueuePoolOfSandbox().Update(t.Context(), event.UpdateEvent{ObjectOld: in("a"), ObjectNew: in("b")}, q)
		}, []string{"a", "b"}},
	} {
		t.Run(name, func(t *testing.T) {
			q := &recordingQueue{}
			tc.send(q)
			require.ElementsMatch(t, tc.want, q.names)
		})
	}
}

// recordingQueue records the pools that are added with the gathering delay.
type recordingQueue struct {
	workqueue.TypedRateLimitingInterface[reconcile.Request]
	names []string
}

func (q *recordingQueue) AddAfter(r reconcile.Request, after time.Duration) {
	if after == gatherDelay {
		q.names = append(q.names, r.Name)
	}
}

func TestSooner(t *testing.T) {
	for _, tc := range []struct{ a, b, want time.Duration }{{0, 0, 0}, {0, 2, 2}, {2, 0, 2}, {1, 2, 1}, {2, 1, 1}} {
		require.Equal(t, tc.want, sooner(tc.a, tc.b), fmt.Sprint(tc))
	}
}

func TestIdlenessIsUninterrupted(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	i := newIdleness(clock)
	require.Equal(t, map[string]time.Duration{"a": 0}, i.update(poolID, []string{"a"}))
	clock.Step(time.Second)
	require.Equal(t, map[string]time.Duration{"a": time.Second, "b": 0}, i.update(poolID, []string{"a", "b"}))
	clock.Step(time.Second)
	i.update(poolID, []string{"b"})
	require.Equal(t, map[string]time.Duration{"a": 0, "b": time.Second}, i.update(poolID, []string{"a", "b"}))
	require.Equal(t, map[string]time.Duration{"a": 0}, i.update(types.NamespacedName{Name: "other"}, []string{"a"}), "pools are mixed up")
	i.forget(poolID)
	require.Equal(t, map[string]time.Duration{"a": 0}, i.update(poolID, []string{"a"}))
}
