//go:build integration

package app_test

import (
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func condition(s *v1alpha1.Sandbox, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(s.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

// runSandbox creates a sandbox and waits until it is Running.
func (env *testEnv) runSandbox(name string, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	env.t.Helper()
	env.sandbox(name, change...)
	return env.waitFor(name, "Running with a container", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.SandboxID != ""
	})
}

func TestDeclaredSandboxRunsAndIsDeleted(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	s := env.runSandbox("web", func(s *v1alpha1.Sandbox) {
		s.Annotations = map[string]string{v1alpha1.AnnotationTraceparent: traceparent}
	})

	uid := string(s.UID)
	require.Equal(t, "a", s.Status.AssignedPod)
	require.Equal(t, "node-1", s.Status.NodeName)
	require.Equal(t, uid+"-1", s.Status.SandboxID)
	require.Equal(t, []string{"10.0.0.9:8080"}, s.Status.Endpoints)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Equal(t, s.Generation, s.Status.ObservedGeneration)
	require.Equal(t, int64(1), s.Generation, "the spec was written")
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer)
	require.Equal(t, "node-1", s.Labels[v1alpha1.LabelNode])
	require.Equal(t, metav1.ConditionTrue, condition(s, v1alpha1.ConditionReady).Status)
	require.Equal(t, "Assigned", condition(s, v1alpha1.ConditionScheduled).Reason)
	assignment, err := s.Assignment()
	require.NoError(t, err)
	require.Equal(t, a.info.GetPodUid(), assignment.AgentUID)

	require.Len(t, a.createCalls(), 1)
	call := a.createCalls()[0]
	require.True(t, call.GetPersisted())
	require.Equal(t, traceparent, call.GetRecord().GetTraceparent())
	require.Equal(t, "busybox", call.GetRecord().GetSpec().GetImage())
	require.Equal(t, sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG, call.GetRecord().GetConsistencyMode())

	env.delete("web")
	env.waitForRemoval("web")
	require.Empty(t, a.all())
	require.True(t, env.allocator.wasReleased(uid+"-1"))
	env.eventually(func() bool {
		var list eventsv1.EventList
		require.NoError(t, kube.List(env.ctx, &list, client.InNamespace(env.namespace)))
		seen := map[string]bool{}
		for _, e := range list.Items {
			seen[e.Reason] = true
		}
		return seen["Running"]
	}, func() string { return "there is no Event Running" })
}

// TestDeleteAtEveryPoint deletes a sandbox at each point of its creation. In the end there is no resource, no container, and no
// later create.
func TestDeleteAtEveryPoint(t *testing.T) {
	for name, tc := range map[string]struct {
		prepare func(env *testEnv, a *agent)
		at      func(env *testEnv, a *agent)
		after   func(env *testEnv, a *agent)
	}{
		"immediately": {at: func(*testEnv, *agent) {}},
		"while there is no capacity": {
			prepare: func(env *testEnv, _ *agent) {
				env.allocator.setRefuse(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"))
			},
			at: func(env *testEnv, _ *agent) { env.waitForPhase("s", v1alpha1.PhasePending) },
		},
		"while the agent creates": {
			prepare: func(_ *testEnv, a *agent) { a.set(func(a *agent) { a.gate = make(chan struct{}) }) },
			at: func(env *testEnv, a *agent) {
				env.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "the agent was not called" })
			},
			after: func(_ *testEnv, a *agent) { a.set(func(a *agent) { close(a.gate); a.gate = nil }) },
		},
		"before the registry has it": {
			prepare: func(_ *testEnv, a *agent) { a.set(func(a *agent) { a.unreported = true }) },
			at: func(env *testEnv, a *agent) {
				env.eventually(func() bool { return len(a.all()) == 1 }, func() string { return "not created" })
			},
		},
		"while running": {at: func(env *testEnv, _ *agent) { env.waitForPhase("s", v1alpha1.PhaseRunning) }},
		"while there is no controller": {
			at:    func(env *testEnv, a *agent) { env.waitForPhase("s", v1alpha1.PhaseRunning); env.stop() },
			after: func(env *testEnv, _ *agent) { env.start() },
		},
		"while the creating controller dies": {
			prepare: func(_ *testEnv, a *agent) { a.set(func(a *agent) { a.gate = make(chan struct{}) }) },
			at: func(env *testEnv, a *agent) {
				env.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "the agent was not called" })
				env.stop()
			},
			after: func(env *testEnv, a *agent) { a.set(func(a *agent) { close(a.gate); a.gate = nil }); env.start() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			if tc.prepare != nil {
				tc.prepare(env, a)
			}
			env.start()
			s := env.sandbox("s")
			tc.at(env, a)
			env.delete("s")
			if tc.after != nil {
				tc.after(env, a)
			}
			env.waitForRemoval("s")
			for _, r := range a.all() {
				require.NotEqual(t, string(s.UID), r.GetRecord().GetFence().GetSandboxUid(), "a container is not removed")
			}
			calls := len(a.createCalls())
			env.consistently(400*time.Millisecond, "created after its deletion", func() bool { return len(a.createCalls()) == calls && len(a.all()) == 0 })
		})
	}
}

// TestDeleteBeforeTheFirstReconcile: a fast sandbox is deleted before a controller has processed it. It has no status, the
// finalizer that it was created with, and a running container.
func TestDeleteBeforeTheFirstReconcile(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.fastSandbox(a, "f", 1)
	env.delete("f")
	require.Len(t, a.all(), 1)
	env.start()
	env.waitForRemoval("f")
	require.Empty(t, a.all())
	require.Empty(t, a.createCalls())
	require.True(t, env.allocator.wasReleased("fast-f-1"))
}

func TestDeleteWaitsForTheAgent(t *testing.T) {
	env := newTestEnv(t)
	env.config.RequeueInterval = time.Hour // until then a silent agent is not reported as unreachable
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	env.delete("s")
	s := env.waitForPhase("s", v1alpha1.PhaseTerminating)
	require.Equal(t, "Terminating", condition(s, v1alpha1.ConditionReady).Reason)
	env.consistently(500*time.Millisecond, "the finalizer was removed before the container", func() bool { return len(env.get("s").Finalizers) == 1 })
	close(gate)
	env.waitForRemoval("s")
}

// TestDeleteWithUnreachableAgent: the deletion waits for an agent that cannot be reached, and the conditions say so. It ends when
// the agent's Pod does not exist, whatever the Registry says: then the janitor removes the container.
func TestDeleteWithUnreachableAgent(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	a.stop()
	env.delete("s")
	s := env.waitFor("s", "stuck", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionReady).Reason == "AgentUnreachable"
	})
	require.Equal(t, v1alpha1.PhaseTerminating, s.Status.Phase)
	require.Equal(t, "Terminating", s.Status.Reason)
	require.Contains(t, s.Status.Message, "agent a on node node-1 has not answered since 20")
	env.hasOneEvent("AgentUnreachable", "see kubectl describe pod a")
	version := env.get("s").ResourceVersion
	env.allocator.setHeartbeat(a, time.Now().Add(-time.Hour), false)
	env.consistently(600*time.Millisecond, "removed although the Pod exists", func() bool { return len(env.get("s").Finalizers) == 1 })
	require.Equal(t, version, env.get("s").ResourceVersion, "the status was written again")
	require.Len(t, env.events("AgentUnreachable"), 1)
	require.NoError(t, kube.Delete(env.ctx, env.pod("a"), client.GracePeriodSeconds(0)))
	env.waitForRemoval("s")
}

// TestDeleteWhileTheAgentPodIsDeleted: the agent does not respond, because the network of its Pod is removed, and the Registry may
// still have the agent. Even with long intervals, the deletion ends when the Pod is removed.
func TestDeleteWhileTheAgentPodIsDeleted(t *testing.T) {
	for name, known := range map[string]bool{"registry has the agent": true, "registry does not have the agent": false} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			env.config.DeletionPoll, env.config.RequeueInterval, env.allocator.heartbeatTimeout = time.Hour, time.Hour, time.Hour
			env.start()
			env.runSandbox("s")
			a.set(func(a *agent) { a.deleteGate = make(chan struct{}) })
			pod := env.pod("a")
			require.NoError(t, kube.Delete(env.ctx, pod)) // a Pod on a node waits for its kubelet
			require.NotNil(t, env.pod("a").DeletionTimestamp)
			env.delete("s")
			env.eventually(func() bool { return a.deleteCalls() == 1 }, func() string { return "the agent was not called" })
			if !known {
				env.allocator.remove(a)
			}
			env.consistently(300*time.Millisecond, "removed before the Pod", func() bool { return len(env.get("s").Finalizers) == 1 })
			require.NoError(t, kube.Delete(env.ctx, pod, client.GracePeriodSeconds(0)))
			env.waitForRemoval("s")
		})
	}
}

// TestDeleteDoesNotWaitForTheAllocator: the Registry learns from the agent that the container is removed.
func TestDeleteDoesNotWaitForTheAllocator(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s")
	env.allocator.stop()
	env.delete("s")
	env.waitForRemoval("s")
	require.Empty(t, a.all())
}

func TestRequestAtFaultFails(t *testing.T) {
	for reason, word := range map[fault.Reason]string{
		fault.ImageNotFound: "ImageNotFound", fault.CommandNotFound: "CommandNotFound", fault.CommandNotExecutable: "CommandNotExecutable",
		fault.UserNotFound: "UserNotFound", fault.WorkingDirInvalid: "WorkingDirInvalid", fault.InvalidField: "InvalidField",
	} {
		t.Run(word, func(t *testing.T) {
			env := newTestEnv(t)
			a, other := env.agentFor("a"), env.agentFor("b")
			a.set(func(a *agent) {
				a.createErr = fault.New(errdefs.ErrFailedPrecondition, reason, "not found: %s", word)
			})
			env.start()
			env.sandbox("s")
			s := env.waitFor("s", "Failed and released", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseFailed && s.Annotations[v1alpha1.AnnotationAssignment] == "" && s.Status.AssignedPod == ""
			})
			require.Equal(t, word, s.Status.Reason)
			require.Contains(t, s.Status.Message, "not found")
			require.Equal(t, word, condition(s, v1alpha1.ConditionReady).Reason)
			require.True(t, env.allocator.wasReleased(string(s.UID)+"-1"))
			require.Empty(t, other.createCalls(), "an invalid request was sent to another agent")
			env.consistently(500*time.Millisecond, "created again", func() bool { return len(a.createCalls()) == 1 })
			env.delete("s")
			env.waitForRemoval("s")
		})
	}
}

func TestRefusingAgentIsExcluded(t *testing.T) {
	for name, err := range map[string]error{
		"full":        fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"),
		"port":        fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "taken"),
		"draining":    fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "draining"),
		"fence":       fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "fence was deleted"),
		"unavailable": fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "no registry").RetryIn(50 * time.Millisecond),
	} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a, b := env.agentFor("a"), env.agentFor("b")
			a.set(func(a *agent) { a.createErr = err })
			env.start()
			s := env.runSandbox("s")
			require.Equal(t, "b", s.Status.AssignedPod)
			require.Equal(t, int64(2), s.Status.Attempt)
			require.Len(t, b.all(), 1)
			if name != "unavailable" {
				require.Len(t, a.createCalls(), 1, "the agent was asked again")
			}
			require.NotZero(t, a.deleteCalls(), "the fence was not deleted on the first agent")
			require.True(t, env.allocator.wasReleased(string(s.UID)+"-1"))
		})
	}
}

func TestControllerRestartWhileCreating(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.gate = gate })
	env.start()
	env.sandbox("s")
	env.waitForPhase("s", v1alpha1.PhaseBound)
	env.stop()
	close(gate)
	env.start()
	s := env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.all(), 1)
}

// fastSandbox creates a sandbox like the allocator's fast path: the container first, then the resource.
func (env *testEnv) fastSandbox(a *agent, name string, attempt int64, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	env.t.Helper()
	uid := "fast-" + name
	fence := &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: a.info.GetPodUid()}
	a.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence), StartTime: timestamppb.Now(),
		Record: &agentv1.SandboxRecord{Fence: fence, Namespace: env.namespace, Name: name}})
	return env.sandbox(name, append(change, func(s *v1alpha1.Sandbox) {
		s.Annotations = map[string]string{v1alpha1.AnnotationSandboxUID: uid}
		s.Finalizers = []string{v1alpha1.Finalizer}
		s.SetAssignment(&v1alpha1.Assignment{AgentPod: a.info.GetPodName(), AgentUID: a.info.GetPodUid(), NodeName: "node-1",
			AgentAddress: a.address, SandboxUID: uid, Attempt: attempt})
	})...)
}

func (env *testEnv) exitProcess(a *agent, id string, code int32, reason string) {
	for _, r := range a.all() {
		if r.GetContainerId() == id {
			r = proto.CloneOf(r)
			r.State, r.ExitCode, r.Reason, r.FinishTime = agentv1.SandboxState_SANDBOX_STATE_STOPPED, proto.Int32(code), reason, timestamppb.Now()
			a.put(r)
		}
	}
}
