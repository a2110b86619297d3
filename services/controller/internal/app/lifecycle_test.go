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

func (env *testEnv) pod(name string) *corev1.Pod {
	env.t.Helper()
	var p corev1.Pod
	require.NoError(env.t, kube.Get(env.ctx, client.ObjectKey{Namespace: env.namespace, Name: name}, &p))
	return &p
}

func (env *testEnv) change(name string, change func(*v1alpha1.Sandbox)) {
	env.t.Helper()
	s := env.get(name)
	old := s.DeepCopy()
	change(s)
	require.NoError(env.t, kube.Patch(env.ctx, s, client.MergeFrom(old)))
}

// removeAgent stops an agent and deletes its Pod.
func (env *testEnv) removeAgent(a *agent) {
	env.t.Helper()
	a.stop()
	require.NoError(env.t, kube.Delete(env.ctx, env.pod(a.info.GetPodName()), client.GracePeriodSeconds(0)))
	env.allocator.remove(a)
}

func TestFastSandboxFollowsReports(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.fastSandbox(a, "ok", 1)
	env.fastSandbox(a, "bad", 1)
	for _, name := range []string{"ok", "bad"} {
		s := env.waitForPhase(name, v1alpha1.PhaseRunning)
		require.Equal(t, "FastPath", condition(s, v1alpha1.ConditionScheduled).Reason)
		require.Equal(t, "fast-"+name+"-1", s.Status.SandboxID)
		require.Equal(t, int64(1), s.Status.Attempt)
	}
	env.exitProcess(a, "fast-ok-1", 0, "Completed")
	s := env.waitFor("ok", "finished", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionFinished).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
	require.Equal(t, "Completed", s.Status.Reason)
	require.Equal(t, int32(0), *s.Status.ExitCode)
	require.NotNil(t, s.Status.FinishTime)
	require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionReady).Status)
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment], "the container is kept for its logs")

	env.exitProcess(a, "fast-bad-1", 3, "Error")
	s = env.waitForPhase("bad", v1alpha1.PhaseFailed)
	require.Equal(t, int32(3), *s.Status.ExitCode)
	require.Equal(t, "Error", s.Status.Reason)
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	env.consistently(500*time.Millisecond, "the failed container was removed", func() bool { return len(a.all()) == 2 && a.deleteCalls() == 0 })
	require.Empty(t, a.createCalls(), "a fast sandbox was created again")
	for _, name := range []string{"ok", "bad"} {
		env.delete(name)
		env.waitForRemoval(name)
	}
	require.Empty(t, a.all())
}

func TestFastSandboxBeforeTheRegistry(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	a.set(func(a *agent) { a.unreported = true })
	env.fastSandbox(a, "f", 1)
	env.waitForPhase("f", v1alpha1.PhaseRunning) // by the agent's own snapshot
	require.Empty(t, a.createCalls())
}

// TestFastSandboxAfterTheSnapshot: a cached snapshot of the agent may be older than a sandbox.
func TestFastSandboxAfterTheSnapshot(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	a.set(func(a *agent) { a.unreported = true })
	for _, name := range []string{"f", "g", "h"} {
		env.fastSandbox(a, name, 1)
		env.waitForPhase(name, v1alpha1.PhaseRunning)
	}
	require.Empty(t, a.createCalls())
}

func TestRemovedContainerFails(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	s := env.runSandbox("s")
	a.removeContainer(string(s.UID) + "-1")
	s = env.waitFor("s", "failed and released", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseFailed && s.Annotations[v1alpha1.AnnotationAssignment] == ""
	})
	require.Equal(t, "ContainerGone", s.Status.Reason)
	require.Len(t, a.createCalls(), 1)
}

func TestExpire(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	at := metav1.NewTime(time.Now().Add(3 * time.Second).Truncate(time.Second))
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &at })
	s := env.waitForPhase("s", v1alpha1.PhaseExpired)
	require.GreaterOrEqual(t, time.Since(at.Time), time.Duration(0), "expired too early")
	require.Empty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	require.Empty(t, s.Status.AssignedPod)
	require.Empty(t, a.all())
	require.True(t, env.allocator.wasReleased(string(s.UID)+"-1"))
	deletes := a.deleteCalls()
	env.delete("s")
	env.waitForRemoval("s")
	require.Equal(t, deletes, a.deleteCalls(), "an expired sandbox has no container")

	past := metav1.NewTime(time.Now().Add(-time.Hour))
	env.sandbox("late", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	env.waitForPhase("late", v1alpha1.PhaseExpired)
	require.Len(t, a.createCalls(), 1, "an expired sandbox was started")
}

func TestReset(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	born := metav1.NewMicroTime(time.Now().Add(-time.Minute).Truncate(time.Microsecond))
	s := env.runSandbox("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &born })
	require.Equal(t, int64(1), s.Status.Attempt, "the initial revision caused a reset")
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s = env.waitFor("s", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 2 && s.Status.SandboxID == string(s.UID)+"-2"
	})
	require.True(t, next.Equal(s.Status.AcceptedResetRevision))
	require.Len(t, a.all(), 1)
	require.True(t, env.allocator.wasReleased(string(s.UID)+"-1"))

	// A failed sandbox can be reset, too.
	env.exitProcess(a, string(s.UID)+"-2", 1, "Error")
	env.waitForPhase("s", v1alpha1.PhaseFailed)
	again := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &again })
	s = env.waitFor("s", "attempt 3", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 3
	})
	require.Nil(t, s.Status.ExitCode)
}

func TestResetOfAFastSandboxCreates(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.fastSandbox(a, "f", 1)
	env.waitForPhase("f", v1alpha1.PhaseRunning)
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	env.change("f", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s := env.waitFor("f", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.SandboxID == "fast-f-2"
	})
	require.Equal(t, "Assigned", condition(s, v1alpha1.ConditionScheduled).Reason)
	require.Len(t, a.createCalls(), 1)
}

func TestAgentLossManual(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	b := env.agentFor("b")
	env.start()
	env.runSandbox("s")
	env.removeAgent(a)
	s := env.waitFor("s", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase, "Manual keeps the phase")
	require.Equal(t, "AgentLost", condition(s, v1alpha1.ConditionReady).Reason)
	env.consistently(500*time.Millisecond, "rescheduled without a reset", func() bool { return len(b.createCalls()) == 0 })

	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	s = env.waitFor("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
	})
	require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionAgentLost).Status)
}

func TestAgentLossAutoRecreate(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.agentFor("b")
	env.start()
	env.runSandbox("s", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(1))
	})
	done := env.runSandbox("done", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds, s.Spec.ExposedPorts = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(0)), nil
	})
	env.exitProcess(a, string(done.UID)+"-1", 0, "Completed")
	env.waitFor("done", "finished", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionFinished).Status == metav1.ConditionTrue
	})
	env.removeAgent(a)
	s := env.waitFor("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
	})
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Equal(t, int64(1), env.get("done").Status.Attempt, "a finished sandbox was started again")
	env.delete("done")
	env.waitForRemoval("done")
}

// TestAnsweringAgentIsNotLost: the Registry has no heartbeat of the agent, but the agent answers.
func TestAnsweringAgentIsNotLost(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s", func(s *v1alpha1.Sandbox) {
		s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(0))
	})
	env.allocator.setHeartbeat(a, time.Now().Add(-time.Hour), false)
	env.consistently(1500*time.Millisecond, "lost although it answers", func() bool {
		s := env.get("s")
		return s.Status.Attempt == 1 && condition(s, v1alpha1.ConditionAgentLost).Status != metav1.ConditionTrue
	})
	a.stop()
	env.allocator.setHeartbeat(a, time.Now().Add(-time.Hour), false)
	env.waitForPhase("s", v1alpha1.PhasePending) // the recovery timeout is zero
}

// TestContainerOfAnEarlierAttemptIsRemoved: an agent that was lost is back with its containers.
func TestContainerOfAnEarlierAttemptIsRemoved(t *testing.T) {
	env := newTestEnv(t)
	a, b := env.agentFor("a"), env.agentFor("b")
	env.start()
	s := env.fastSandbox(b, "f", 2)
	env.waitForPhase("f", v1alpha1.PhaseRunning)
	stale := b.all()[0]
	stale.Record.Fence.Attempt, stale.Record.Fence.AgentUid = 1, a.info.GetPodUid()
	a.put(stale)
	env.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "the stale container is not removed" })
	require.Len(t, b.all(), 1)
	require.Equal(t, v1alpha1.PhaseRunning, env.get(s.Name).Status.Phase)
}

func TestUnavailableRegistryLosesNoSandbox(t *testing.T) {
	env := newTestEnv(t)
	env.agentFor("a")
	env.start()
	env.runSandbox("s")
	env.stop()
	reachable := env.allocator.address
	env.allocator.address = "127.0.0.1:1"
	env.start()
	env.consistently(time.Second, "changed without the Registry", func() bool { return env.get("s").Status.Phase == v1alpha1.PhaseRunning })
	require.NotEqual(t, metav1.ConditionTrue, condition(env.get("s"), v1alpha1.ConditionAgentLost).Status)
	env.stop()
	env.allocator.address = reachable
}

// TestUnreportedRemovedContainer: the Registry knows neither of the container nor of its removal.
func TestUnreportedRemovedContainer(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	a.set(func(a *agent) { a.unreported = true })
	env.runSandbox("s")
	for _, r := range a.all() {
		a.removeContainer(r.GetContainerId())
	}
	s := env.waitForPhase("s", v1alpha1.PhaseFailed)
	require.Equal(t, "ContainerGone", s.Status.Reason)
}

// refuser fails some patches while it is on.
type refuser struct {
	http.RoundTripper
	status  bool // patches of statuses; otherwise all other patches of sandboxes
	on      *atomic.Bool
	refused *atomic.Int32
}

// refusePatches fails patches of the controller while the result's on is true.
func (env *testEnv) refusePatches(status bool) refuser {
	r := refuser{status: status, on: new(atomic.Bool), refused: new(atomic.Int32)}
	env.wrap = func(next http.RoundTripper) http.RoundTripper { return refuser{next, r.status, r.on, r.refused} }
	return r
}

// RoundTrip implements http.RoundTripper.
func (n refuser) RoundTrip(r *http.Request) (*http.Response, error) {
	if n.on.Load() && r.Method == http.MethodPatch && strings.Contains(r.URL.Path, "/sandboxes/") && strings.HasSuffix(r.URL.Path, "/status") == n.status {
		n.refused.Add(1)
		return nil, errors.New("refused by the test")
	}
	return n.RoundTripper.RoundTrip(r)
}

// TestAttemptIsNeverUsedTwice: before an assignment is cleared, its attempt has to be written to the status, because its
// container may appear again. Here the status cannot be written, and there is no other capacity.
func TestAttemptIsNeverUsedTwice(t *testing.T) {
	env := newTestEnv(t)
	b := env.agentFor("b")
	status := env.refusePatches(true)
	status.on.Store(true)
	env.allocator.setRefuse(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"))
	s := env.sandbox("s")
	env.change("s", func(x *v1alpha1.Sandbox) { // as after a controller and an agent have died
		x.Finalizers = []string{v1alpha1.Finalizer}
		x.SetAssignment(&v1alpha1.Assignment{AgentPod: "a", AgentUID: "gone", NodeName: "node-1", AgentAddress: "127.0.0.1:1",
			SandboxUID: string(s.UID), Attempt: 1})
	})
	env.start()
	env.eventually(func() bool { return status.refused.Load() >= 3 }, func() string { return "the controller writes nothing" })
	require.NotEmpty(t, env.get("s").Annotations[v1alpha1.AnnotationAssignment], "cleared before its attempt was written")
	status.on.Store(false)
	env.allocator.setRefuse(nil)
	got := env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, int64(2), got.Status.Attempt)
	require.Len(t, b.createCalls(), 1)
}

// TestNewAttemptWaitsForTheStatus: with an outdated status, the new assignment would be reset again.
func TestNewAttemptWaitsForTheStatus(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	status := env.refusePatches(true)
	env.start()
	env.runSandbox("s")
	status.on.Store(true)
	env.reset("s")
	unassigned := func() bool { return env.get("s").Annotations[v1alpha1.AnnotationAssignment] == "" }
	env.eventually(unassigned, func() string { return "the reset has not started" })
	env.consistently(500*time.Millisecond, "the next attempt started before the status was written", unassigned)
	require.Positive(t, status.refused.Load())
	status.on.Store(false)
	s := env.waitFor("s", "another attempt", func(s *v1alpha1.Sandbox) bool { return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt > 1 })
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Len(t, a.createCalls(), 2)
}

// TestResourceRemovedInSpiteOfItsFinalizer: a deletion that started before the finalizer was written does not wait for it.
func TestResourceRemovedInSpiteOfItsFinalizer(t *testing.T) {
	for name, again := range map[string]bool{"the name is not used again": false, "the name is used again": true} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			metadata := env.refusePatches(false)
			env.start()
			env.runSandbox("s")
			metadata.on.Store(true) // the controller would put the finalizer back
			env.change("s", func(s *v1alpha1.Sandbox) { s.Finalizers = nil })
			env.delete("s")
			env.waitForRemoval("s")
			metadata.on.Store(false)
			if again {
				last := env.runSandbox("s")
				env.eventually(func() bool { return len(a.all()) == 1 }, func() string { return "the container of the first sandbox is not removed" })
				require.Equal(t, string(last.UID), a.all()[0].GetRecord().GetFence().GetSandboxUid())
				return
			}
			env.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "its container is not removed" })
		})
	}
}

// TestFastSandboxOfRemovedAgent: the agent is removed before the controller processes the resource.
func TestFastSandboxOfRemovedAgent(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.fastSandbox(a, "f", 1)
	env.removeAgent(a)
	env.start()
	s := env.waitFor("f", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseBound, s.Status.Phase)
	env.delete("f")
	env.waitForRemoval("f")
}

// TestAcknowledgedSandboxOfRemovedAgent: the client knows that the sandbox ran, so its resource says so, even if the agent was
// removed before the controller processed the resource.
func TestAcknowledgedSandboxOfRemovedAgent(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	started := metav1.NewMicroTime(time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC))
	env.fastSandbox(a, "f", 1, func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = []int32{80} })
	env.change("f", func(s *v1alpha1.Sandbox) {
		assignment, err := s.Assignment()
		require.NoError(t, err)
		assignment.Started = &v1alpha1.Started{SandboxID: "fast-f-1", StartTime: started, StartPath: v1alpha1.StartPathSlot, Endpoints: []string{"10.0.0.1:80"}}
		s.SetAssignment(assignment)
	})
	env.removeAgent(a)
	env.start()
	s := env.waitFor("f", "AgentLost", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
	})
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
	require.Equal(t, "fast-f-1", s.Status.SandboxID)
	require.Equal(t, []string{"10.0.0.1:80"}, s.Status.Endpoints)
	require.True(t, started.Equal(s.Status.StartTime), "%v", s.Status.StartTime)
	require.Equal(t, v1alpha1.StartPathSlot, s.Status.StartPath)
	require.Equal(t, "AgentLost", condition(s, v1alpha1.ConditionReady).Reason)
	env.delete("f")
	env.waitForRemoval("f")
}
