//go:build integration

package app_test

import (
	"errors"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func (w *world) pod(name string) *corev1.Pod {
	w.t.Helper()
	var p corev1.Pod
	require.NoError(w.t, kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &p))
	return &p
}

func (w *world) change(name string, change func(*v1alpha1.Sandbox)) {
	w.t.Helper()
	s := w.get(name)
	old := s.DeepCopy()
	change(s)
	require.NoError(w.t, kube.Patch(w.ctx, s, client.MergeFrom(old)))
}

// vanish ends an agent with its Pod.
func (w *world) vanish(a *agent) {
	w.t.Helper()
	a.stop()
	require.NoError(w.t, kube.Delete(w.ctx, w.pod(a.info.GetPodName()), client.GracePeriodSeconds(0)))
	w.allocator.gone(a)
}

func TestFastSandboxFollowsItsReports(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.fast(a, "ok", 1)
	w.fast(a, "bad", 1)
	for _, name := range []string{"ok", "bad"} {
		s := w.reachesPhase(name, v1alpha1.PhaseRunning)
		require.Equal(t, "FastPath", condition(s, v1alpha1.ConditionScheduled).Reason)
		require.Equal(t, "fast-"+name+"-1", s.Status.SandboxID)
		require.Equal(t, int64(1), s.Status.Attempt)
	}
	w.ends(a, "fast-ok-1", 0, "Completed")
	s := w.reaches("ok", "finished", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionFinished).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
	require.Equal(t, "Completed", s.Status.Reason)
	require.Equal(t, int32(0), *s.Status.ExitCode)
	require.NotNil(t, s.Status.FinishTime)
	require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionReady).Status)
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment], "the container is kept for its logs")

	w.ends(a, "fast-bad-1", 3, "Error")
	s = w.reachesPhase("bad", v1alpha1.PhaseFailed)
	require.Equal(t, int32(3), *s.Status.ExitCode)
	require.Equal(t, "Error", s.Status.Reason)
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	w.stays(500*time.Millisecond, "the failed container was removed", func() bool { return len(a.all()) == 2 && a.deleteCalls() == 0 })
	require.Empty(t, a.createCalls(), "a fast sandbox was created a second time")
	for _, name := range []string{"ok", "bad"} {
		w.delete(name)
		w.vanishes(name)
	}
	require.Empty(t, a.all())
}

func TestFastSandboxOfWhichTheRegistryIsLate(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	a.set(func(a *agent) { a.mute = true })
	w.fast(a, "f", 1)
	w.reachesPhase("f", v1alpha1.PhaseRunning) // by the agent's own word
	require.Empty(t, a.createCalls())
}

// What the agent has said for the sake of one sandbox says nothing of another that was created after.
func TestFastSandboxThatIsNewerThanTheAgentsWord(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	a.set(func(a *agent) { a.mute = true })
	for _, name := range []string{"f", "g", "h"} {
		w.fast(a, name, 1)
		w.reachesPhase(name, v1alpha1.PhaseRunning)
	}
	require.Empty(t, a.createCalls())
}

func TestContainerThatVanishesFails(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	s := w.runs("s")
	a.lose(string(s.UID) + "-1")
	s = w.reaches("s", "failed and released", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseFailed && s.Annotations[v1alpha1.AnnotationAssignment] == ""
	})
	require.Equal(t, "ContainerGone", s.Status.Reason)
	require.Len(t, a.createCalls(), 1)
}

func TestExpire(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s")
	at := metav1.NewTime(time.Now().Add(3 * time.Second).Truncate(time.Second))
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &at })
	s := w.reachesPhase("s", v1alpha1.PhaseExpired)
	require.GreaterOrEqual(t, time.Since(at.Time), time.Duration(0), "before its time")
	require.Empty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	require.Empty(t, s.Status.AssignedPod)
	require.Empty(t, a.all())
	require.True(t, w.allocator.wasReleased(string(s.UID)+"-1"))
	deletes := a.deleteCalls()
	w.delete("s")
	w.vanishes("s")
	require.Equal(t, deletes, a.deleteCalls(), "an expired sandbox has nothing to remove")

	past := metav1.NewTime(time.Now().Add(-time.Hour))
	w.sandbox("late", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	w.reachesPhase("late", v1alpha1.PhaseExpired)
	require.Len(t, a.createCalls(), 1, "a sandbox past its time was started")
}

func TestReset(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	born := metav1.NewMicroTime(time.Now().Add(-time.Minute).Truncate(time.Microsecond))
	s := w.runs("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &born })
	require.Equal(t, int64(1), s.Status.Attempt, "the revision that it was born with reset it")
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s = w.reaches("s", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 2 && s.Status.SandboxID == string(s.UID)+"-2"
	})
	require.True(t, next.Equal(s.Status.AcceptedResetRevision))
	require.Len(t, a.all(), 1)
	require.True(t, w.allocator.wasReleased(string(s.UID)+"-1"))

	// A failed one comes back the same way.
	w.ends(a, string(s.UID)+"-2", 1, "Error")
	w.reachesPhase("s", v1alpha1.PhaseFailed)
	again := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &again })
	s = w.reaches("s", "attempt 3", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 3
	})
	require.Nil(t, s.Status.ExitCode)
}

func TestResetOfAFastSandboxCreates(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.fast(a, "f", 1)
	w.reachesPhase("f", v1alpha1.PhaseRunning)
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	w.change("f", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s := w.reaches("f", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.SandboxID == "fast-f-2"
	})
	require.Equal(t, "Assigned", condition(s, v1alpha1.ConditionScheduled).Reason)
	require.Len(t, a.createCalls(), 1)
}

func TestAgentLossManual(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	b := w.agentFor("b")
	w.start()
	w.runs("s")
	w.vanish(a)
	s := w.reaches("s", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase, "Manual keeps the phase")
	require.Equal(t, "AgentLost", condition(s, v1alpha1.ConditionReady).Reason)
	w.stays(500*time.Millisecond, "rescheduled by itself", func() bool { return len(b.createCalls()) == 0 })

	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s = w.reaches("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
	})
	require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionAgentLost).Status)
}

func TestAgentLossAutoRecreate(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.agentFor("b")
	w.start()
	w.runs("s", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(1))
	})
	done := w.runs("done", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds, s.Spec.ExposedPorts = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(0)), nil
	})
	w.ends(a, string(done.UID)+"-1", 0, "Completed")
	w.reaches("done", "finished", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionFinished).Status == metav1.ConditionTrue
	})
	w.vanish(a)
	s := w.reaches("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
	})
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Equal(t, int64(1), w.get("done").Status.Attempt, "a sandbox that had finished was run again")
	w.delete("done")
	w.vanishes("done")
}

// TestAgentThatAnswersIsNotLost: the Registry hears nothing of the agent, but it answers: nothing is done.
func TestAgentThatAnswersIsNotLost(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(0))
	})
	w.allocator.silent(a, time.Now().Add(-time.Hour), false)
	w.stays(1500*time.Millisecond, "held lost though it answers", func() bool {
		s := w.get("s")
		return s.Status.Attempt == 1 && condition(s, v1alpha1.ConditionAgentLost).Status != metav1.ConditionTrue
	})
	a.stop()
	w.allocator.silent(a, time.Now().Add(-time.Hour), false)
	w.reachesPhase("s", v1alpha1.PhasePending) // a recovery timeout of nothing is over at once
}

// TestContainerOfAnEarlierAttemptIsRemoved: an agent that was lost comes back with what it had.
func TestContainerOfAnEarlierAttemptIsRemoved(t *testing.T) {
	w := newWorld(t)
	a, b := w.agentFor("a"), w.agentFor("b")
	w.start()
	s := w.fast(b, "f", 2)
	w.reachesPhase("f", v1alpha1.PhaseRunning)
	stale := b.all()[0]
	stale.Record.Fence.Attempt, stale.Record.Fence.AgentUid = 1, a.info.GetPodUid()
	a.put(stale)
	w.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "the stale container is left" })
	require.Len(t, b.all(), 1)
	require.Equal(t, v1alpha1.PhaseRunning, w.get(s.Name).Status.Phase)
}

func TestRegistryThatIsAwayLosesNobody(t *testing.T) {
	w := newWorld(t)
	w.agentFor("a")
	w.start()
	w.runs("s")
	w.stop()
	reachable := w.allocator.address
	w.allocator.address = "127.0.0.1:1"
	w.start()
	w.stays(time.Second, "changed without a Registry", func() bool { return w.get("s").Status.Phase == v1alpha1.PhaseRunning })
	require.NotEqual(t, metav1.ConditionTrue, condition(w.get("s"), v1alpha1.ConditionAgentLost).Status)
	w.stop()
	w.allocator.address = reachable
}

// TestContainerThatVanishesUnreported: the Registry heard neither of the container nor of its end.
func TestContainerThatVanishesUnreported(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	a.set(func(a *agent) { a.mute = true })
	w.runs("s")
	a.set(func(a *agent) { clear(a.reports) })
	s := w.reachesPhase("s", v1alpha1.PhaseFailed)
	require.Equal(t, "ContainerGone", s.Status.Reason)
}

// refuser refuses some patches while it is on.
type refuser struct {
	http.RoundTripper
	status  bool // those of statuses, or else all others of sandboxes
	on      *atomic.Bool
	refused *atomic.Int32
}

// refuses has the controller's patches refused while the answer's on is true.
func (w *world) refuses(status bool) refuser {
	r := refuser{status: status, on: new(atomic.Bool), refused: new(atomic.Int32)}
	w.wrap = func(next http.RoundTripper) http.RoundTripper { return refuser{next, r.status, r.on, r.refused} }
	return r
}

// RoundTrip refuses, or does not.
func (n refuser) RoundTrip(r *http.Request) (*http.Response, error) {
	if n.on.Load() && r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/sandboxes/") && strings.HasSuffix(r.URL.Path, "/status") == n.status {
		n.refused.Add(1)
		return nil, errors.New("not today")
	}
	return n.RoundTripper.RoundTrip(r)
}

// TestAttemptIsNeverUsedTwice: the attempt of an assignment that is given up must be durable first, for its containers may
// turn up again. Here the status cannot be written, and no other place can be had.
func TestAttemptIsNeverUsedTwice(t *testing.T) {
	w := newWorld(t)
	b := w.agentFor("b")
	status := w.refuses(true)
	status.on.Store(true)
	w.allocator.setRefuse(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"))
	s := w.sandbox("s")
	w.change("s", func(x *v1alpha1.Sandbox) { // as a controller left it that died after the assignment, with its agent
		x.Finalizers = []string{v1alpha1.Finalizer}
		x.SetAssignment(&v1alpha1.Assignment{AgentPod: "a", AgentUID: "gone", NodeName: "node-1", AgentAddress: "127.0.0.1:1",
			SandboxUID: string(s.UID), Attempt: 1})
	})
	w.start()
	w.eventually(func() bool { return status.refused.Load() >= 3 }, func() string { return "the controller does nothing" })
	require.NotEmpty(t, w.get("s").Annotations[v1alpha1.AnnotationAssignment], "given up before its attempt was written down")
	status.on.Store(false)
	w.allocator.setRefuse(nil)
	got := w.reachesPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, int64(2), got.Status.Attempt)
	require.Len(t, b.createCalls(), 1)
}

// TestANewAttemptWaitsForTheStatus: an assignment that is newer than the status would be taken for the one that a reset asks
// to end, and be reset in turn.
func TestANewAttemptWaitsForTheStatus(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	status := w.refuses(true)
	w.start()
	w.runs("s")
	status.on.Store(true)
	w.reset("s")
	unassigned := func() bool { return w.get("s").Annotations[v1alpha1.AnnotationAssignment] == "" }
	w.eventually(unassigned, func() string { return "the reset is not begun" })
	w.stays(500*time.Millisecond, "the next attempt began before the last one's end was written down", unassigned)
	require.Positive(t, status.refused.Load())
	status.on.Store(false)
	s := w.reaches("s", "another attempt", func(s *v1alpha1.Sandbox) bool { return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt > 1 })
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Len(t, a.createCalls(), 2)
}

// TestAResourceThatGoesInSpiteOfItsFinalizer: a deletion that began before the finalizer was written is not held by it.
func TestAResourceThatGoesInSpiteOfItsFinalizer(t *testing.T) {
	for name, again := range map[string]bool{"the name stays free": false, "the name is taken again": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.agentFor("a")
			metadata := w.refuses(false)
			w.start()
			w.runs("s")
			metadata.on.Store(true) // the controller would put the finalizer back
			w.change("s", func(s *v1alpha1.Sandbox) { s.Finalizers = nil })
			w.delete("s")
			w.vanishes("s")
			metadata.on.Store(false)
			if again {
				last := w.runs("s")
				w.eventually(func() bool { return len(a.all()) == 1 }, func() string { return "the first one's container is left" })
				require.Equal(t, string(last.UID), a.all()[0].GetRecord().GetFence().GetSandboxUid())
				return
			}
			w.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "its container is left" })
		})
	}
}

// TestFastSandboxWhoseAgentWasGoneAtOnce: acknowledged, and its agent lost before anybody looked at the resource.
func TestFastSandboxWhoseAgentWasGoneAtOnce(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.fast(a, "f", 1)
	w.vanish(a)
	w.start()
	s := w.reaches("f", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseBound, s.Status.Phase)
	w.delete("f")
	w.vanishes("f")
}

// TestAcknowledgedSandboxWhoseAgentIsGone: the client knows that the sandbox ran, so its resource says so, whatever became
// of the agent before a controller saw it.
func TestAcknowledgedSandboxWhoseAgentIsGone(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	started := metav1.NewMicroTime(time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC))
	w.fast(a, "f", 1, func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = []int32{80} })
	w.change("f", func(s *v1alpha1.Sandbox) {
		assignment, err := s.Assignment()
		require.NoError(t, err)
		assignment.Started = &v1alpha1.Started{SandboxID: "fast-f-1", StartTime: started, StartPath: v1alpha1.StartPathSlot, Endpoints: []string{"10.0.0.1:80"}}
		s.SetAssignment(assignment)
	})
	w.vanish(a)
	w.start()
	s := w.reaches("f", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
	require.Equal(t, "fast-f-1", s.Status.SandboxID)
	require.Equal(t, []string{"10.0.0.1:80"}, s.Status.Endpoints)
	require.True(t, started.Equal(s.Status.StartTime), "%v", s.Status.StartTime)
	require.Equal(t, v1alpha1.StartPathSlot, s.Status.StartPath)
	require.Equal(t, "AgentLost", condition(s, v1alpha1.ConditionReady).Reason)
	w.delete("f")
	w.vanishes("f")
}
