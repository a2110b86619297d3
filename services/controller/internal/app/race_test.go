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

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func (env *testEnv) reset(name string) metav1.MicroTime {
	env.t.Helper()
	next := metav1.NewMicroTime(time.Now().Truncate(time.Microsecond))
	env.change(name, func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &next })
	return next
}

// TestRecreateWithTheSameName: each incarnation has its own container, and none of an earlier one is left.
func TestRecreateWithTheSameName(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	seen := map[string]bool{}
	for i := range 6 {
		s := env.sandbox("s")
		require.False(t, seen[string(s.UID)])
		seen[string(s.UID)] = true
		if i%2 == 0 { // the others are deleted at some point before that
			got := env.waitForPhase("s", v1alpha1.PhaseRunning)
			require.Equal(t, int64(1), got.Status.Attempt, "the attempt of an earlier incarnation was used")
			require.Equal(t, string(s.UID)+"-1", got.Status.SandboxID)
		}
		env.delete("s")
		env.waitForRemoval("s")
	}
	last := env.runSandbox("s")
	// The container of an incarnation that was deleted before its finalizer was written is removed a moment later.
	env.eventually(func() bool { return len(a.all()) == 1 }, func() string { return fmt.Sprintf("containers are not removed: %v", a.all()) })
	require.Equal(t, string(last.UID), a.all()[0].GetRecord().GetFence().GetSandboxUid())
}

// TestConcurrentCreatesAndDeletes: one client creates a name whenever it does not exist, another one deletes it whenever it
// exists. In the end there is the sandbox that was created last, or none.
func TestConcurrentCreatesAndDeletes(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
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
		s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: "s"}, Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "pool"}}
		err := kube.Create(env.ctx, s)
		if err == nil {
			made++
		}
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		return err
	})
	loop(func() error {
		s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: "s"}}
		return client.IgnoreNotFound(kube.Delete(env.ctx, s))
	})
	wg.Wait()
	select {
	case err := <-failed:
		require.NoError(t, err)
	default:
	}
	require.Greater(t, made, 1, "the sandbox was created once")
	env.deleteIfExists("s")
	env.waitForRemoval("s")
	env.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "a container is not removed" })
	env.runSandbox("s")
	require.Len(t, a.all(), 1)
}

// deleteIfExists deletes a sandbox that may not exist.
func (env *testEnv) deleteIfExists(name string) {
	env.t.Helper()
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: name}}
	require.NoError(env.t, client.IgnoreNotFound(kube.Delete(env.ctx, s)))
}

// TestResetDuringDelete: the deletion continues, and no second container is created.
func TestResetDuringDelete(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	env.start()
	env.runSandbox("s")
	env.delete("s")
	env.waitForPhase("s", v1alpha1.PhaseTerminating)
	env.reset("s")
	env.consistently(400*time.Millisecond, "the reset changed the phase", func() bool { return env.get("s").Status.Phase == v1alpha1.PhaseTerminating })
	close(gate)
	env.waitForRemoval("s")
	require.Len(t, a.createCalls(), 1)
	require.Empty(t, a.all())
}

// TestDeleteDuringReset: the sandbox is deleted while its container is removed for a reset.
func TestDeleteDuringReset(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	env.start()
	env.runSandbox("s")
	env.reset("s")
	s := env.waitFor("s", "Resetting", func(s *v1alpha1.Sandbox) bool { return condition(s, v1alpha1.ConditionReady).Reason == "Resetting" })
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase, "the phase says that the container is removed")
	env.delete("s")
	env.waitForPhase("s", v1alpha1.PhaseTerminating)
	close(gate)
	env.waitForRemoval("s")
	require.Len(t, a.createCalls(), 1)
}

// TestExpireTimeChangedTooLate: the removal of the container has started. It continues, and no second container is created.
func TestExpireTimeChangedTooLate(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	env.start()
	env.runSandbox("s")
	past := metav1.NewTime(time.Now().Add(-time.Second))
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	env.waitFor("s", "Expiring", func(s *v1alpha1.Sandbox) bool { return s.Status.Reason == "Expiring" })
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = nil })
	env.stop()
	env.start() // the next process continues the removal
	close(gate)
	env.waitForPhase("s", v1alpha1.PhaseExpired)
	require.Len(t, a.createCalls(), 1)
}

// TestExpiredStaysExpired: in seed 002 only deletion leaves Expired. Neither a later expire time nor a reset does, and an Event
// says so.
func TestExpiredStaysExpired(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	past := metav1.NewTime(time.Now().Add(-time.Hour))
	env.sandbox("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &past })
	env.waitForPhase("s", v1alpha1.PhaseExpired)
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = ptr.To(metav1.NewTime(time.Now().Add(time.Hour))) })
	env.reset("s")
	env.eventually(func() bool { return len(env.events("StaysExpired")) > 0 }, func() string { return "there is no Event" })
	s := env.waitFor("s", "observed", func(s *v1alpha1.Sandbox) bool { return s.Status.ObservedGeneration == s.Generation })
	env.consistently(400*time.Millisecond, "the phase has changed", func() bool { return env.get("s").Status.Phase == v1alpha1.PhaseExpired })
	require.Nil(t, s.Status.AcceptedResetRevision)
	require.Empty(t, a.createCalls())
	env.delete("s")
	env.waitForRemoval("s")
}

// TestConcurrentWriter: a client changes labels and annotations while the controller creates a sandbox and resets it twice. No
// write is lost.
func TestConcurrentWriter(t *testing.T) {
	env := newTestEnv(t)
	env.agentFor("a")
	env.start()
	env.sandbox("s")
	ctx, cancel := context.WithCancel(env.ctx)
	defer cancel()
	written := make(chan int, 1)
	failed := make(chan error, 1)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			patch := fmt.Sprintf(`{"metadata":{"labels":{"n%d":"x"},"annotations":{"a%d":"y"}}}`, n%40, n%40)
			s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: "s"}}
			if err := kube.Patch(ctx, s, client.RawPatch("application/merge-patch+json", []byte(patch))); err != nil {
				if !errors.Is(err, context.Canceled) && ctx.Err() == nil {
					failed <- err
				}
				break
			}
		}
		written <- n
	}()
	env.waitForPhase("s", v1alpha1.PhaseRunning)
	for attempt := int64(2); attempt <= 3; attempt++ {
		env.reset("s")
		env.waitFor("s", "another attempt", func(s *v1alpha1.Sandbox) bool {
			return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == attempt && s.Status.SandboxID == fmt.Sprintf("%s-%d", s.UID, attempt)
		})
	}
	cancel()
	n := min(<-written, 40)
	require.Empty(t, failed)
	s := env.get("s")
	for i := range n {
		require.Equal(t, "x", s.Labels[fmt.Sprint("n", i)], "label %d of %d is lost", i, n)
		require.Equal(t, "y", s.Annotations[fmt.Sprint("a", i)])
	}
	require.Equal(t, "node-1", s.Labels[v1alpha1.LabelNode])
	require.NotEmpty(t, s.Annotations[v1alpha1.AnnotationAssignment])
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer)
}

// skewed is a clock that differs from the others.
type skewed struct {
	clock.RealClock

	by time.Duration
}

// Now implements clock.PassiveClock.
func (c skewed) Now() time.Time { return c.RealClock.Now().Add(c.by) }

// Since implements clock.PassiveClock.
func (c skewed) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// TestClockSkew: the controller's clock differs by half a minute from those of agents, allocator and API server. Only the time
// at which a sandbox expires depends on it.
func TestClockSkew(t *testing.T) {
	for _, by := range []time.Duration{30 * time.Second, -30 * time.Second} {
		t.Run(by.String(), func(t *testing.T) {
			env := newTestEnv(t)
			a, b := env.agentFor("a"), env.agentFor("b")
			env.clock = skewed{by: by}
			env.start()
			recreate := func(s *v1alpha1.Sandbox) {
				s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds, s.Spec.ExposedPorts = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(1)), nil
			}
			s := env.runSandbox("s", recreate)
			require.Equal(t, "a", s.Status.AssignedPod)
			// A draining agent is not ready, but it is not lost.
			_, err := a.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: a.info.GetPodUid()})
			require.NoError(t, err)
			env.consistently(1500*time.Millisecond, "lost because of the clock", func() bool {
				s := env.get("s")
				return s.Status.Attempt == 1 && condition(s, v1alpha1.ConditionAgentLost).Status != metav1.ConditionTrue
			})
			a.stop()
			env.allocator.setHeartbeat(a, time.Now(), false)
			lost := env.waitFor("s", "AgentLost", func(s *v1alpha1.Sandbox) bool {
				return condition(s, v1alpha1.ConditionAgentLost).Status == metav1.ConditionTrue
			})
			require.Equal(t, v1alpha1.PhaseRunning, lost.Status.Phase)
			env.waitFor("s", "Running elsewhere", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.AssignedPod == "b"
			})
			require.Len(t, b.all(), 1)
			env.reset("s")
			env.waitFor("s", "attempt 3", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 3
			})
			env.delete("s")
			env.waitForRemoval("s")
		})
	}
}
