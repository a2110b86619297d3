//go:build integration

package app_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// setDefaultPool annotates the namespace.
func (env *testEnv) setDefaultPool(pool string) {
	env.t.Helper()
	var ns corev1.Namespace
	require.NoError(env.t, kube.Get(env.ctx, client.ObjectKey{Name: env.namespace}, &ns))
	old := ns.DeepCopy()
	ns.Annotations = map[string]string{v1alpha1.AnnotationDefaultPool: pool}
	require.NoError(env.t, kube.Patch(env.ctx, &ns, client.MergeFrom(old)))
}

func noPool(s *v1alpha1.Sandbox) { s.Spec.PoolRef, s.Spec.ExposedPorts = "", nil }

// TestDefaultPool: a Sandbox that names no pool is placed in the default pool of its namespace.
func TestDefaultPool(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.sandbox("s", noPool)
	s := env.waitFor("s", "PoolNotFound", func(s *v1alpha1.Sandbox) bool {
		return condition(s, v1alpha1.ConditionScheduled).Reason == "PoolNotFound"
	})
	require.Equal(t, "default", s.Status.Pool)
	require.Contains(t, condition(s, v1alpha1.ConditionScheduled).Message, "there is no SandboxPool default")

	env.pool()
	env.setDefaultPool("pool") // a Sandbox that is not placed yet follows the change
	env.startAgentIn(env.waitForAgents(1)[0])
	s = env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, "pool", s.Status.Pool)
	require.Equal(t, "pool", s.Labels[v1alpha1.LabelPool])
	require.Empty(t, s.Spec.PoolRef, "the spec was written")
	env.eventually(func() bool { return env.getPool().Status.ActiveSandboxes == 1 }, func() string { return "the pool does not count it" })

	env.setDefaultPool("other") // a Sandbox that runs stays
	env.change("s", func(s *v1alpha1.Sandbox) { s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate })
	s = env.waitFor("s", "observed", func(s *v1alpha1.Sandbox) bool { return s.Status.ObservedGeneration == s.Generation })
	require.Equal(t, "pool", s.Status.Pool)
	env.delete("s")
	env.waitForRemoval("s")
}

// TestDefaultPoolGrows: Sandboxes that name no pool are demand for the default pool.
func TestDefaultPoolGrows(t *testing.T) {
	env := newTestEnv(t)
	env.setDefaultPool("pool")
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMax: 1} })
	env.sandbox("s", noPool)
	env.startAgentIn(env.waitForAgents(1)[0])
	env.waitForPhase("s", v1alpha1.PhaseRunning)
}

// TestPoolOfFastSandbox: the resource of a sandbox of the fast path may name no pool; its agent has one.
func TestPoolOfFastSandbox(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.fastSandbox(a, "f", 1, noPool)
	s := env.waitForPhase("f", v1alpha1.PhaseRunning)
	require.Equal(t, "pool", s.Status.Pool)
}
