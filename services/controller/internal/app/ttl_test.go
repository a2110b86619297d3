//go:build integration

package app_test

import (
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

func withTTL(d time.Duration) func(*v1alpha1.Sandbox) {
	return func(s *v1alpha1.Sandbox) {
		s.Spec.TTLAfterFinished, s.Spec.ExposedPorts = &metav1.Duration{Duration: d}, nil
	}
}

// finish ends the process of a running sandbox, and waits for the status.
func (env *testEnv) finish(a *agent, name string, code int32) time.Time {
	env.t.Helper()
	env.exitProcess(a, env.get(name).Status.SandboxID, code, "")
	s := env.waitFor(name, "finished", func(s *v1alpha1.Sandbox) bool { return s.Status.FinishTime != nil })
	return s.Status.FinishTime.Time
}

// TestFinishedSandboxIsDeletedAfterItsTTL: whatever its exit code.
func TestFinishedSandboxIsDeletedAfterItsTTL(t *testing.T) {
	for name, code := range map[string]int32{"completed": 0, "failed": 3} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			env.start()
			env.runSandbox("s", withTTL(2*time.Second))
			finished := env.finish(a, "s", code)
			env.waitForRemoval("s")
			require.GreaterOrEqual(t, time.Since(finished), 2*time.Second, "deleted too early")
			require.Empty(t, a.all())
			env.hasOneEvent("TTLExpired", "ttlAfterFinished is 2s")
		})
	}
}

func TestTTLOfThePool(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	env.runSandbox("own", withTTL(time.Hour))
	env.finish(a, "s", 0)
	env.finish(a, "own", 0)
	env.consistently(500*time.Millisecond, "deleted before an hour", func() bool { return env.get("s").DeletionTimestamp == nil })
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.TTLAfterFinished = &metav1.Duration{Duration: time.Second} })
	env.waitForRemoval("s")
	require.Nil(t, env.get("own").DeletionTimestamp, "the spec's ttlAfterFinished overrides the pool's")
}

func TestTTLCanBeChanged(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s", withTTL(time.Hour))
	env.finish(a, "s", 0)
	env.change("s", withTTL(0))
	env.waitForRemoval("s")
}

// TestTTLNeedsAFinishedProcess: neither a running sandbox nor one that never ran is deleted.
func TestTTLNeedsAFinishedProcess(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("running", withTTL(0))
	a.set(func(a *agent) {
		a.createErr = fault.New(errdefs.ErrFailedPrecondition, fault.ImageNotFound, "not found")
	})
	env.sandbox("invalid", withTTL(0))
	env.waitForPhase("invalid", v1alpha1.PhaseFailed)
	env.consistently(700*time.Millisecond, "deleted", func() bool {
		return env.get("running").DeletionTimestamp == nil && env.get("invalid").DeletionTimestamp == nil
	})
}

// TestResetEndsTheTTL: a sandbox that was reset runs again, and has no finish time.
func TestResetEndsTheTTL(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s", withTTL(2*time.Second))
	env.finish(a, "s", 0)
	env.reset("s")
	s := env.waitFor("s", "attempt 2", func(s *v1alpha1.Sandbox) bool {
		return s.Status.Phase == v1alpha1.PhaseRunning && s.Status.Attempt == 2 && s.Status.SandboxID != ""
	})
	require.Nil(t, s.Status.FinishTime)
	env.consistently(2500*time.Millisecond, "deleted after the reset", func() bool { return env.get("s").DeletionTimestamp == nil })
}

// TestFinishedSandboxesUseNoCapacity: a pool does not keep agents for them, but keeps those that have them.
func TestFinishedSandboxesUseNoCapacity(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) {
		p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 4, BufferMin: 1, BufferMax: 1}
	})
	first := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s1", noPorts)
	env.runSandbox("s2", noPorts)
	env.waitForAgents(2) // both sandboxes fill the first agent: bufferMin needs a second one
	env.finish(first, "s1", 0)
	env.finish(first, "s2", 1)
	env.eventually(func() bool {
		st := env.getPool().Status
		return st.ActiveSandboxes == 0 && st.FreeCapacity == 2 && st.DesiredAgents == 1
	}, func() string { return "finished sandboxes use capacity" })
	env.waitForAgents(1) // the second agent is surplus
	require.True(t, hasPodOf(env.pods(), first), "the agent with the logs was deleted")
}

// TestDeletedSandboxesAreNoDemand: a controller that starts finds more Sandboxes that are being deleted than the agents can run.
func TestDeletedSandboxesAreNoDemand(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) {
		p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 4, BufferMin: 1, BufferMax: 2}
	})
	a := env.startAgentIn(env.waitForAgents(1)[0])
	env.stop()
	gate := make(chan struct{})
	a.set(func(a *agent) { a.deleteGate = gate })
	names := []string{"a", "b", "c", "d", "e", "f"}
	for _, name := range names {
		env.sandbox(name, noPorts, func(s *v1alpha1.Sandbox) {
			s.Annotations = map[string]string{v1alpha1.AnnotationSandboxUID: "fast-" + name}
			s.Finalizers = []string{v1alpha1.Finalizer}
			s.SetAssignment(&v1alpha1.Assignment{AgentPod: a.info.GetPodName(), AgentUID: a.info.GetPodUid(), AgentAddress: a.address,
				SandboxUID: "fast-" + name, Attempt: 1})
		})
		env.delete(name)
	}
	env.start()
	env.eventually(func() bool { return a.deleteCalls() == len(names) }, func() string { return "the agent was not called" })
	env.consistently(time.Second, "an agent was created for deleted sandboxes", func() bool { return len(env.pods()) == 1 })
	require.Zero(t, env.getPool().Status.ActiveSandboxes)
	close(gate)
	for _, name := range names {
		env.waitForRemoval(name)
	}
}
