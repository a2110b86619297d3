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

// TestUnplacedSandbox: a condition and one Event explain why no agent was found, and the controller tries again.
func TestUnplacedSandbox(t *testing.T) {
	refuse := func(class error, reason fault.Reason) func(*testEnv) {
		return func(env *testEnv) {
			env.allocator.setRefuse(fault.New(class, reason, "not now").RetryIn(50 * time.Millisecond))
		}
	}
	full := refuse(errdefs.ErrResourceExhausted, fault.NoCapacity)
	small := func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{} }
	for name, tc := range map[string]struct {
		prepare func(*testEnv)
		pool    func(*v1alpha1.SandboxPool) // nil for no pool
		silent  bool
		reason  string
		words   string
	}{
		"no pool":       {refuse(errdefs.ErrNotFound, fault.PoolNotFound), nil, false, "PoolNotFound", "there is no SandboxPool pool in namespace"},
		"at poolMax":    {full, small, false, "NoCapacity", "the pool has its poolMax of 0 agents: raise it"},
		"growing":       {full, func(*v1alpha1.SandboxPool) {}, false, "NoCapacity", "another agent is being created"},
		"none is ready": {full, small, true, "NoReadyAgent", "no agent of SandboxPool pool is ready (1 HeartbeatTimeout)"},
		"port in use":   {refuse(errdefs.ErrResourceExhausted, fault.PortConflict), small, false, "PortConflict", "one of the ports [8080] is in use"},
		"no allocator":  {refuse(errdefs.ErrUnavailable, fault.NotLeader), small, false, "AllocatorUnavailable", "not now"},
		"anything else": {refuse(errdefs.ErrUnknown, fault.Internal), small, false, "Internal", "not now"},
	} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			tc.prepare(env)
			if tc.silent {
				env.allocator.setHeartbeat(a, time.Now(), false)
			}
			env.start()
			if tc.pool != nil {
				env.pool(tc.pool)
				env.eventually(func() bool { return env.getPool().Status.ObservedGeneration > 0 }, func() string { return "the pool is not reconciled" })
			}
			env.sandbox("s")
			s := env.waitFor("s", "unscheduled", func(s *v1alpha1.Sandbox) bool {
				c := condition(s, v1alpha1.ConditionScheduled)
				return c.Reason == tc.reason && strings.Contains(c.Message, tc.words)
			})
			require.Equal(t, v1alpha1.PhasePending, s.Status.Phase)
			require.Equal(t, metav1.ConditionFalse, condition(s, v1alpha1.ConditionScheduled).Status)
			require.Equal(t, tc.reason, condition(s, v1alpha1.ConditionReady).Reason)
			require.Empty(t, a.createCalls())
			calls := env.allocator.allocateCalls()
			env.eventually(func() bool { return env.allocator.allocateCalls() >= calls+3 }, func() string { return "not tried again" })
			env.hasOneEvent(tc.reason, tc.words)
			env.allocator.setHeartbeat(a, time.Now(), true)
			env.allocator.setRefuse(nil)
			env.waitForPhase("s", v1alpha1.PhaseRunning)
		})
	}
}

func TestPendingInDeletedPool(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("on", noPorts)
	require.NoError(t, kube.Delete(env.ctx, env.getPool()))
	env.waitForProgressing("Deleting", "waiting for 1 sandbox")
	env.sandbox("s", noPorts)
	s := env.waitFor("s", "PoolDeleting", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionScheduled).Reason == "PoolDeleting"
	})
	require.Equal(t, v1alpha1.PhasePending, s.Status.Phase)
	env.hasOneEvent("PoolDeleting", "is being deleted")
	env.delete("on")
	env.eventually(func() bool { return !env.poolExists() }, func() string { return "the pool waits for a sandbox that it does not run" })
	env.waitFor("s", "PoolNotFound", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionScheduled).Reason == "PoolNotFound"
	})
}

// TestBoundSandboxExplainsItself: a slow pull, an agent that does not answer, and a create that is retried.
func TestBoundSandboxExplainsItself(t *testing.T) {
	ready := func(reason, words string) func(*v1alpha1.Sandbox) bool {
		return func(s *v1alpha1.Sandbox) bool {
			c := condition(s, v1alpha1.ConditionReady)
			return s.Status.Phase == v1alpha1.PhaseBound && c.Reason == reason && strings.Contains(c.Message, words) && s.Status.Reason == reason
		}
	}
	t.Run("image", func(t *testing.T) {
		env := newTestEnv(t)
		a := env.agentFor("a")
		gate := make(chan struct{})
		a.set(func(a *agent) { a.gate = gate })
		env.start()
		env.sandbox("s")
		env.waitFor("s", "PullingImage", ready("PullingImage", "agent a has been pulling the image busybox since 20"))
		env.hasOneEvent("PullingImage", "busybox")
		close(gate)
		env.waitForPhase("s", v1alpha1.PhaseRunning)
	})
	t.Run("no answer", func(t *testing.T) {
		env := newTestEnv(t)
		a := env.agentFor("a")
		a.set(func(a *agent) { a.answerGate = make(chan struct{}) })
		env.start()
		env.sandbox("s")
		env.waitFor("s", "AgentNotAnswering", ready("AgentNotAnswering", "agent a on node node-1 was asked at 20"))
		env.hasOneEvent("AgentNotAnswering", "agent a")
		a.set(func(a *agent) { close(a.answerGate); a.answerGate = nil })
		env.waitForPhase("s", v1alpha1.PhaseRunning)
	})
	t.Run("failure", func(t *testing.T) {
		env := newTestEnv(t)
		a := env.agentFor("a")
		a.set(func(a *agent) {
			a.createErr = fault.New(errdefs.ErrUnavailable, fault.ImagePullFailed, "no route to the registry")
		})
		env.config.RequeueInterval = time.Second
		env.start()
		env.sandbox("s")
		env.waitFor("s", "ImagePullFailed", ready("ImagePullFailed", "no route to the registry"))
		env.eventually(func() bool { return len(a.createCalls()) == 2 }, func() string { return "not tried again" })
		env.hasOneEvent("ImagePullFailed", "asked again: no route")
		a.set(func(a *agent) { a.createErr = nil })
		env.waitForPhase("s", v1alpha1.PhaseRunning)
	})
}
