//go:build integration

package app_test

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// TestNoPlaceIsToldAndWaitedFor: a Pending sandbox says what it lacks and what can be done, in a condition and one Event.
func TestNoPlaceIsToldAndWaitedFor(t *testing.T) {
	refuse := func(class error, reason fault.Reason) func(*world) {
		return func(w *world) {
			w.allocator.setRefuse(fault.New(class, reason, "not now").RetryIn(50 * time.Millisecond))
		}
	}
	full := refuse(errdefs.ErrResourceExhausted, fault.NoCapacity)
	small := func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{} }
	for name, tc := range map[string]struct {
		prepare func(*world)
		pool    func(*v1alpha1.SandboxPool) // nil for no pool
		silent  bool
		reason  string
		words   string
	}{
		"no pool":       {refuse(errdefs.ErrNotFound, fault.PoolNotFound), nil, false, "PoolNotFound", "there is no SandboxPool pool in namespace"},
		"at poolMax":    {full, small, false, "NoCapacity", "the pool has its poolMax of 0 agents: raise it"},
		"growing":       {full, func(*v1alpha1.SandboxPool) {}, false, "NoCapacity", "another agent is on its way"},
		"none is well":  {full, small, true, "NoReadyAgent", "no agent of SandboxPool pool takes sandboxes (1 HeartbeatTimeout)"},
		"port taken":    {refuse(errdefs.ErrResourceExhausted, fault.PortConflict), small, false, "PortConflict", "the ports [8080] taken"},
		"no allocator":  {refuse(errdefs.ErrUnavailable, fault.NotLeader), small, false, "AllocatorUnavailable", "not now"},
		"anything else": {refuse(errdefs.ErrUnknown, fault.Internal), small, false, "Internal", "not now"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.agentFor("a")
			tc.prepare(w)
			if tc.silent {
				w.allocator.silent(a, time.Now(), false)
			}
			w.start()
			if tc.pool != nil {
				w.pool(tc.pool)
				w.eventually(func() bool { return w.getPool().Status.ObservedGeneration > 0 }, func() string { return "the pool is not seen" })
			}
			w.sandbox("s")
			s := w.reaches("s", "unscheduled", func(s *v1alpha1.Sandbox) bool {
				c := condition(s, v1alpha1.ConditionScheduled)
				return c.Reason == tc.reason && strings.Contains(c.Message, tc.words)
			})
			require.Equal(t, v1alpha1.PhasePending, s.Status.Phase)
			require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionScheduled).Status)
			require.Equal(t, tc.reason, condition(s, v1alpha1.ConditionReady).Reason)
			require.Empty(t, a.createCalls())
			calls := w.allocator.allocateCalls()
			w.eventually(func() bool { return w.allocator.allocateCalls() >= calls+3 }, func() string { return "does not try again" })
			w.tellsOnce(tc.reason, tc.words)
			w.allocator.silent(a, time.Now(), true)
			w.allocator.setRefuse(nil)
			w.reachesPhase("s", v1alpha1.PhaseRunning)
		})
	}
}

// TestPendingInADeletedPool: the sandbox has no place there any more, says so, and may go elsewhere only by a person's will.
func TestPendingInADeletedPool(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	w.up(w.settles(1)[0])
	w.runs("on", noPorts)
	require.NoError(t, kube.Delete(w.ctx, w.getPool()))
	w.progresses("Deleting", "waits for 1 sandbox")
	w.sandbox("s", noPorts)
	s := w.reaches("s", "PoolDeleting", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionScheduled).Reason == "PoolDeleting"
	})
	require.Equal(t, v1alpha1.PhasePending, s.Status.Phase)
	w.tellsOnce("PoolDeleting", "is being deleted")
	w.delete("on")
	w.eventually(func() bool { return !w.poolIsThere() }, func() string { return "the pool waits for one that it does not run" })
	w.reaches("s", "PoolNotFound", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionScheduled).Reason == "PoolNotFound"
	})
}

// TestBoundSaysWhatItWaitsFor: an image that takes long, an agent that says nothing, a failure that is tried again.
func TestBoundSaysWhatItWaitsFor(t *testing.T) {
	ready := func(reason, words string) func(*v1alpha1.Sandbox) bool {
		return func(s *v1alpha1.Sandbox) bool {
			c := condition(s, v1alpha1.ConditionReady)
			return s.Status.Phase == v1alpha1.PhaseBound && c.Reason == reason && strings.Contains(c.Message, words) && s.Status.Reason == reason
		}
	}
	t.Run("image", func(t *testing.T) {
		w := newWorld(t)
		a := w.agentFor("a")
		gate := make(chan struct{})
		a.set(func(a *agent) { a.gate = gate })
		w.start()
		w.sandbox("s")
		w.reaches("s", "PullingImage", ready("PullingImage", "agent a pulls the image busybox since 20"))
		w.tellsOnce("PullingImage", "busybox")
		close(gate)
		w.reachesPhase("s", v1alpha1.PhaseRunning)
	})
	t.Run("no answer", func(t *testing.T) {
		w := newWorld(t)
		a := w.agentFor("a")
		a.set(func(a *agent) { a.deaf = make(chan struct{}) })
		w.start()
		w.sandbox("s")
		w.reaches("s", "AgentNotAnswering", ready("AgentNotAnswering", "agent a on node node-1 was asked at 20"))
		w.tellsOnce("AgentNotAnswering", "agent a")
		a.set(func(a *agent) { close(a.deaf); a.deaf = nil })
		w.reachesPhase("s", v1alpha1.PhaseRunning)
	})
	t.Run("failure", func(t *testing.T) {
		w := newWorld(t)
		a := w.agentFor("a")
		a.set(func(a *agent) {
			a.createErr = fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "no route to the registry")
		})
		w.config.RequeueInterval = time.Second
		w.start()
		w.sandbox("s")
		w.reaches("s", "ImagePullFailed", ready("ImagePullFailed", "no route to the registry"))
		w.eventually(func() bool { return len(a.createCalls()) == 2 }, func() string { return "not tried again" })
		w.tellsOnce("ImagePullFailed", "asked again: no route")
		a.set(func(a *agent) { a.createErr = nil })
		w.reachesPhase("s", v1alpha1.PhaseRunning)
	})
}
