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

// runs has a declared sandbox brought to Running and returns it.
func (w *world) runs(name string, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	w.t.Helper()
	w.sandbox(name, change...)
	return w.reaches(name, "Running with a container", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.SandboxID != ""
	})
}

func TestDeclaredSandboxRunsAndIsDeleted(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	const traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	s := w.runs("web", func(s *v1alpha1.Sandbox) {
		s.Annotations = map[string]string{v1alpha1.AnnotationTraceparent: traceparent}
	})

	uid := string(s.UID)
	require.Equal(t, "a", s.Status.AssignedPod)
	require.Equal(t, "node-1", s.Status.NodeName)
	require.Equal(t, uid+"-1", s.Status.SandboxID)
	require.Equal(t, []string{"10.0.0.9:8080"}, s.Status.Endpoints)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Equal(t, s.Generation, s.Status.ObservedGeneration)
	require.Equal(t, int64(1), s.Generation, "somebody wrote the spec")
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

	w.delete("web")
	w.vanishes("web")
	require.Empty(t, a.all())
	require.True(t, w.allocator.wasReleased(uid+"-1"))
	w.eventually(func() bool {
		var list eventsv1.EventList
		require.NoError(t, kube.List(w.ctx, &list, client.InNamespace(w.namespace)))
		seen := map[string]bool{}
		for _, e := range list.Items {
			seen[e.Reason] = true
		}
		return seen["Running"]
	}, func() string { return "no Event tells that it ran" })
}

// TestDeleteAtEveryPoint deletes a sandbox at each point of its creation, and holds the controller to the same end: no
// record, no container, no later create that would be answered.
func TestDeleteAtEveryPoint(t *testing.T) {
	for name, tc := range map[string]struct {
		prepare func(w *world, a *agent)
		at      func(w *world, a *agent)
		after   func(w *world, a *agent)
	}{
		"at once": {at: func(*world, *agent) {}},
		"while there is no place": {
			prepare: func(w *world, _ *agent) {
				w.allocator.setRefuse(fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"))
			},
			at: func(w *world, _ *agent) { w.reachesPhase("s", v1alpha1.PhasePending) },
		},
		"while the agent creates": {
			prepare: func(_ *world, a *agent) { a.set(func(a *agent) { a.gate = make(chan struct{}) }) },
			at: func(w *world, a *agent) {
				w.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "never asked" })
			},
			after: func(_ *world, a *agent) { a.set(func(a *agent) { close(a.gate); a.gate = nil }) },
		},
		"before the registry has heard of it": {
			prepare: func(_ *world, a *agent) { a.set(func(a *agent) { a.mute = true }) },
			at: func(w *world, a *agent) {
				w.eventually(func() bool { return len(a.all()) == 1 }, func() string { return "never made" })
			},
		},
		"while running": {at: func(w *world, _ *agent) { w.reachesPhase("s", v1alpha1.PhaseRunning) }},
		"while the controller is away": {
			at:    func(w *world, a *agent) { w.reachesPhase("s", v1alpha1.PhaseRunning); w.stop() },
			after: func(w *world, _ *agent) { w.start() },
		},
		"while the creating controller dies": {
			prepare: func(_ *world, a *agent) { a.set(func(a *agent) { a.gate = make(chan struct{}) }) },
			at: func(w *world, a *agent) {
				w.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "never asked" })
				w.stop()
			},
			after: func(w *world, a *agent) { a.set(func(a *agent) { close(a.gate); a.gate = nil }); w.start() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.agentFor("a")
			if tc.prepare != nil {
				tc.prepare(w, a)
			}
			w.start()
			s := w.sandbox("s")
			tc.at(w, a)
			w.delete("s")
			if tc.after != nil {
				tc.after(w, a)
			}
			w.vanishes("s")
			for _, r := range a.all() {
				require.NotEqual(t, string(s.UID), r.GetRecord().GetFence().GetSandboxUid(), "a container is left")
			}
			calls := len(a.createCalls())
			w.stays(400*time.Millisecond, "created after its end", func() bool { return len(a.createCalls()) == calls && len(a.all()) == 0 })
		})
	}
}

// TestDeleteWithNothingButTheAnnotation is a fast sandbox that is deleted before any controller saw it: no status, no
// finalizer but the one that came with it, a container that runs.
func TestDeleteWithNothingButTheAnnotation(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.fast(a, "f", 1)
	w.delete("f")
	require.Len(t, a.all(), 1)
	w.start()
	w.vanishes("f")
	require.Empty(t, a.all())
	require.Empty(t, a.createCalls())
	require.True(t, w.allocator.wasReleased("fast-f-1"))
}

func TestDeleteWaitsForTheAgentsWord(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	w.delete("s")
	s := w.reachesPhase("s", v1alpha1.PhaseTerminating)
	require.Equal(t, "Terminating", condition(s, v1alpha1.ConditionReady).Reason)
	w.stays(500*time.Millisecond, "the finalizer went before the container", func() bool { return len(w.get("s").Finalizers) == 1 })
	close(gate)
	w.vanishes("s")
}

// TestDeleteWhileTheAgentIsGone: an agent that cannot be reached proves nothing, and the conditions say so; a Pod that is
// gone does, whatever the Registry knows, for what it left is the janitor's.
func TestDeleteWhileTheAgentIsGone(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s")
	a.stop()
	w.delete("s")
	s := w.reaches("s", "stuck", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionReady).Reason == "AgentUnreachable"
	})
	require.Equal(t, v1alpha1.PhaseTerminating, s.Status.Phase)
	require.Equal(t, "Terminating", s.Status.Reason)
	require.Contains(t, s.Status.Message, "agent a on node node-1 does not answer since 20")
	w.tellsOnce("AgentUnreachable", "see kubectl describe pod a")
	version := w.get("s").ResourceVersion
	w.allocator.silent(a, time.Now().Add(-time.Hour), false)
	w.stays(600*time.Millisecond, "removed although the Pod is there", func() bool { return len(w.get("s").Finalizers) == 1 })
	require.Equal(t, version, w.get("s").ResourceVersion, "written again and again")
	require.Len(t, w.events("AgentUnreachable"), 1)
	require.NoError(t, kube.Delete(w.ctx, w.pod("a"), client.GracePeriodSeconds(0)))
	w.vanishes("s")
}

// TestDeleteRightAfterTheAgentsPodWasRolled: the agent hangs, as a Pod's network does that is being taken down, and the
// Registry knows the agent still. With the intervals of production, the deletion ends when the Pod does.
func TestDeleteRightAfterTheAgentsPodWasRolled(t *testing.T) {
	for name, known := range map[string]bool{"registry knows it": true, "registry knows it no more": false} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.agentFor("a")
			w.config.DeletionPoll, w.config.RequeueInterval, w.config.HeartbeatTimeout = time.Hour, time.Hour, time.Hour
			w.start()
			w.runs("s")
			a.set(func(a *agent) { a.deleteGate = make(chan struct{}) })
			pod := w.pod("a")
			require.NoError(t, kube.Delete(w.ctx, pod)) // a Pod on a node waits for its kubelet
			require.NotNil(t, w.pod("a").DeletionTimestamp)
			w.delete("s")
			w.eventually(func() bool { return a.deleteCalls() == 1 }, func() string { return "the agent was not asked" })
			if !known {
				w.allocator.gone(a)
			}
			w.stays(300*time.Millisecond, "gone before its Pod", func() bool { return len(w.get("s").Finalizers) == 1 })
			require.NoError(t, kube.Delete(w.ctx, pod, client.GracePeriodSeconds(0)))
			w.vanishes("s")
		})
	}
}

// TestDeleteDoesNotWaitForTheAllocator: that the place is free the Registry hears from the agent.
func TestDeleteDoesNotWaitForTheAllocator(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s")
	w.allocator.stop()
	w.delete("s")
	w.vanishes("s")
	require.Empty(t, a.all())
}

func TestRequestAtFaultFails(t *testing.T) {
	for reason, word := range map[fault.Reason]string{
		fault.ImageNotFound: "ImageNotFound", fault.CommandNotFound: "CommandNotFound", fault.CommandNotExecutable: "CommandNotExecutable",
		fault.UserNotFound: "UserNotFound", fault.WorkingDirInvalid: "WorkingDirInvalid", fault.InvalidField: "InvalidField",
	} {
		t.Run(word, func(t *testing.T) {
			w := newWorld(t)
			a, other := w.agentFor("a"), w.agentFor("b")
			a.set(func(a *agent) {
				a.createErr = fault.New(errdefs.ErrFailedPrecondition, reason, "no such thing: %s", word)
			})
			w.start()
			w.sandbox("s")
			s := w.reaches("s", "Failed and released", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseFailed && s.Annotations[v1alpha1.AnnotationAssignment] == "" && s.Status.AssignedPod == ""
			})
			require.Equal(t, word, s.Status.Reason)
			require.Contains(t, s.Status.Message, "no such thing")
			require.Equal(t, word, condition(s, v1alpha1.ConditionReady).Reason)
			require.True(t, w.allocator.wasReleased(string(s.UID)+"-1"))
			require.Empty(t, other.createCalls(), "a bad request went on to another agent")
			w.stays(500*time.Millisecond, "tried again", func() bool { return len(a.createCalls()) == 1 })
			w.delete("s")
			w.vanishes("s")
		})
	}
}

func TestAgentThatRefusesIsPassedOver(t *testing.T) {
	for name, err := range map[string]error{
		"full":        fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full"),
		"port":        fault.New(errdefs.ErrResourceExhausted, fault.PortConflict, "taken"),
		"draining":    fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "on its way out"),
		"fence":       fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "not in force"),
		"unavailable": fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "no registry").RetryIn(50 * time.Millisecond),
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a, b := w.agentFor("a"), w.agentFor("b")
			a.set(func(a *agent) { a.createErr = err })
			w.start()
			s := w.runs("s")
			require.Equal(t, "b", s.Status.AssignedPod)
			require.Equal(t, int64(2), s.Status.Attempt)
			require.Len(t, b.all(), 1)
			if name != "unavailable" {
				require.Len(t, a.createCalls(), 1, "a refusal is an answer, and was asked for again")
			}
			require.NotZero(t, a.deleteCalls(), "the first agent was left without a fence delete")
			require.True(t, w.allocator.wasReleased(string(s.UID)+"-1"))
		})
	}
}

func TestControllerThatDiesWhileCreatingGoesOn(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.gate = gate })
	w.start()
	w.sandbox("s")
	w.reachesPhase("s", v1alpha1.PhaseBound)
	w.stop()
	close(gate)
	w.start()
	s := w.reachesPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.all(), 1)
}

// fast makes a sandbox as the allocator's fast path does: container first, resource afterwards.
func (w *world) fast(a *agent, name string, attempt int64, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	w.t.Helper()
	uid := "fast-" + name
	fence := &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: a.info.GetPodUid()}
	a.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence), StartTime: timestamppb.Now(),
		Record: &agentv1.SandboxRecord{Fence: fence, Namespace: w.namespace, Name: name}})
	return w.sandbox(name, append(change, func(s *v1alpha1.Sandbox) {
		s.Annotations = map[string]string{v1alpha1.AnnotationSandboxUID: uid}
		s.Finalizers = []string{v1alpha1.Finalizer}
		s.SetAssignment(&v1alpha1.Assignment{AgentPod: a.info.GetPodName(), AgentUID: a.info.GetPodUid(), NodeName: "node-1",
			AgentAddress: a.address, SandboxUID: uid, Attempt: attempt})
	})...)
}

func (w *world) ends(a *agent, id string, code int32, reason string) {
	a.mu.Lock()
	r := proto.CloneOf(a.reports[id])
	a.mu.Unlock()
	r.State, r.ExitCode, r.Reason, r.FinishTime = agentv1.SandboxState_SANDBOX_STATE_STOPPED, proto.Int32(code), reason, timestamppb.Now()
	a.put(r)
}
