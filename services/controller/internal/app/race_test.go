//go:build integration

package app_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func (w *world) reset(name string) metav1.MicroTime {
	w.t.Helper()
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	w.change(name, func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	return next
}

// TestRecreateAtOnceUnderTheSameName: each life has its own container, and none of a former one is left.
func TestRecreateAtOnceUnderTheSameName(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	seen := map[string]bool{}
	for i := range 6 {
		s := w.sandbox("s")
		require.False(t, seen[string(s.UID)])
		seen[string(s.UID)] = true
		if i%2 == 0 { // the others are deleted somewhere on their way
			got := w.reachesPhase("s", v1alpha1.PhaseRunning)
			require.Equal(t, int64(1), got.Status.Attempt, "an earlier life counts")
			require.Equal(t, string(s.UID)+"-1", got.Status.SandboxID)
		}
		w.delete("s")
		w.vanishes("s")
	}
	last := w.runs("s")
	// A life that ended before its finalizer was written leaves its container a moment longer.
	w.eventually(func() bool { return len(a.all()) == 1 }, func() string { return fmt.Sprintf("containers are left: %v", a.all()) })
	require.Equal(t, string(last.UID), a.all()[0].GetRecord().GetFence().GetSandboxUid())
}

// TestDeleteOfANameThatIsBeingRecreated: a writer creates the name whenever it is free, another deletes it whenever it is
// there. In the end there is what was created last, or nothing.
func TestDeleteOfANameThatIsBeingRecreated(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	until := time.Now().Add(3 * time.Second)
	var wg sync.WaitGroup
	failed := make(chan error, 2)
	made := 0
	loop := func(do func() error) {
		wg.Go(func() {
			for time.Now().Before(until) {
				if err := do(); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	loop(func() error {
		s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "s"}, Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "pool"}}
		err := kube.Create(w.ctx, s)
		if err == nil {
			made++
		}
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
	loop(func() error {
		s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "s"}}
		return client.IgnoreNotFound(kube.Delete(w.ctx, s))
	})
	wg.Wait()
	select {
	case err := <-failed:
		require.NoError(t, err)
	default:
	}
	require.Greater(t, made, 1, "the name was never free")
	w.sandboxOrNothing("s")
	w.vanishes("s")
	w.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "a container is left" })
	w.runs("s")
	require.Len(t, a.all(), 1)
}

// sandboxOrNothing deletes what is there.
func (w *world) sandboxOrNothing(name string) {
	w.t.Helper()
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	require.NoError(w.t, client.IgnoreNotFound(kube.Delete(w.ctx, s)))
}

// TestResetDuringDelete: the deletion goes on, and no second container comes.
func TestResetDuringDelete(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	w.start()
	w.runs("s")
	w.delete("s")
	w.reachesPhase("s", v1alpha1.PhaseTerminating)
	w.reset("s")
	w.stays(400*time.Millisecond, "the reset changed something", func() bool { return w.get("s").Status.Phase == v1alpha1.PhaseTerminating })
	close(gate)
	w.vanishes("s")
	require.Len(t, a.createCalls(), 1)
	require.Empty(t, a.all())
}

// TestDeleteDuringReset: the old container is going for the reset when the deletion comes.
func TestDeleteDuringReset(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	w.start()
	w.runs("s")
	w.reset("s")
	s := w.reaches("s", "Resetting", func(s *v1alpha1.Sandbox) bool { return condition(s, v1alpha1.ConditionReady).Reason == "Resetting" })
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase, "no phase claims that the container is gone")
	w.delete("s")
	w.reachesPhase("s", v1alpha1.PhaseTerminating)
	close(gate)
	w.vanishes("s")
	require.Len(t, a.createCalls(), 1)
}

// TestExpireTimeThatIsMovedTooLate: the container was told to end. It ends, and no second one comes.
func TestExpireTimeThatIsMovedTooLate(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	w.start()
	w.runs("s")
	past := metav1.NewTime(time.Now().Add(-time.Second))
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	w.reaches("s", "Expiring", func(s *v1alpha1.Sandbox) bool { return s.Status.Reason == "Expiring" })
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = nil })
	w.stop()
	w.start() // what was begun is known to the next process, too
	close(gate)
	w.reachesPhase("s", v1alpha1.PhaseExpired)
	require.Len(t, a.createCalls(), 1)
}

// TestExpiredStaysExpired: seed 002 knows one way out of Expired, deletion. Neither a later expire time nor a reset
// revives it, and an Event says so.
func TestExpiredStaysExpired(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	past := metav1.NewTime(time.Now().Add(-time.Hour))
	w.sandbox("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	w.reachesPhase("s", v1alpha1.PhaseExpired)
	w.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = ptr.To(metav1.NewTime(time.Now().Add(time.Hour))) })
	w.reset("s")
	w.eventually(func() bool { return len(w.events("StaysExpired")) > 0 }, func() string { return "no Event tells" })
	s := w.reaches("s", "observed", func(s *v1alpha1.Sandbox) bool { return s.Status.ObservedGeneration == s.Generation })
	w.stays(400*time.Millisecond, "it came back", func() bool { return w.get("s").Status.Phase == v1alpha1.PhaseExpired })
	require.Nil(t, s.Status.AcceptedResetRevision)
	require.Empty(t, a.createCalls())
	w.delete("s")
	w.vanishes("s")
}

// TestTwoWritersOfOneResource: while the controller brings a sandbox through three lives, a person labels it all the time.
// Nobody's words are lost.
func TestTwoWritersOfOneResource(t *testing.T) {
	w := newWorld(t)
	w.agentFor("a")
	w.start()
	w.sandbox("s")
	ctx, cancel := context.WithCancel(w.ctx)
	defer cancel()
	written := make(chan int, 1)
	failed := make(chan error, 1)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			patch := fmt.Sprintf(`{"metadata":{"labels":{"n%d":"x"},"annotations":{"a%d":"y"}}}`, n%40, n%40)
			s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "s"}}
			if err := kube.Patch(ctx, s, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
				if !errors.Is(err, context.Canceled) && ctx.Err() == nil {
					failed <- err
				}
				break
			}
		}
		written <- n
	}()
	w.reachesPhase("s", v1alpha1.PhaseRunning)
	for attempt := int64(2); attempt <= 3; attempt++ {
		w.reset("s")
		w.reaches("s", "another attempt", func(s *v1alpha1.Sandbox) bool {
			return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == attempt && s.Status.SandboxID == fmt.Sprintf("%s-%d", s.UID, attempt)
		})
	}
	cancel()
	n := min(<-written, 40)
	require.Empty(t, failed)
	s := w.get("s")
	for i := range n {
		require.Equal(t, "x", s.Labels[fmt.Sprint("n", i)], "label %d of %d is lost", i, n)
		require.Equal(t, "y", s.Annotations[fmt.Sprint("a", i)])
	}
	require.Equal(t, "node-1", s.Labels[v1alpha1.LabelNode])
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer)
}

// skewed is a clock that is wrong.
type skewed struct {
	clock.RealClock

	by time.Duration
}

// Now is the wrong time.
func (c skewed) Now() time.Time { return c.RealClock.Now().Add(c.by) }

// Since is measured by the wrong time.
func (c skewed) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// TestClocksThatDiffer: the controller's is half a minute off those of agents, allocator and API server. Nothing but the
// moment at which a sandbox expires depends on that.
func TestClocksThatDiffer(t *testing.T) {
	for _, by := range []time.Duration{30 * time.Second, -30 * time.Second} {
		t.Run(by.String(), func(t *testing.T) {
			w := newWorld(t)
			a, b := w.agentFor("a"), w.agentFor("b")
			w.clock = skewed{by: by}
			w.start()
			recreate := func(s *v1alpha1.Sandbox) {
				s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds, s.Spec.ExposedPorts = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(1)), nil
			}
			s := w.runs("s", recreate)
			require.Equal(t, "a", s.Status.AssignedPod)
			// An agent that drains is not heard of by any message, and not lost for that.
			a.set(func(a *agent) { a.draining = true })
			w.allocator.accepts(a, true)
			w.stays(1500*time.Millisecond, "lost by the clock", func() bool {
				s := w.get("s")
				return s.Status.Attempt == 1 && condition(s, v1alpha1.ConditionAgentLost).Status != metav1.ConditionTrue
			})
			a.stop()
			w.allocator.silent(a, time.Now(), false)
			lost := w.reaches("s", "AgentLost", func(s *v1alpha1.Sandbox) bool {
				return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
			})
			require.Equal(t, v1alpha1.PhaseRunning, lost.Status.Phase)
			w.reaches("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
			})
			require.Len(t, b.all(), 1)
			w.reset("s")
			w.reaches("s", "attempt 3", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 3
			})
			w.delete("s")
			w.vanishes("s")
		})
	}
}
