//go:build integration

package app_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// TestSlotsReady: status and condition follow the agents' reports, and the agents receive the pool's bounds.
func TestSlotsReady(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	pods := env.waitForAgents(2)
	has := func(ready int32, reason, message string) {
		t.Helper()
		env.eventually(func() bool {
			p := env.getPool()
			c := poolCondition(p, v1alpha1.ConditionSlotsReady)
			return p.Status.ReadySlots == ready && c.Reason == reason && c.Message == message && (c.Status == "True") == (reason == "SlotsFree")
		}, func() string { return "missing: " + reason + " " + message })
	}
	has(0, "AgentsNotReady", "no agent is ready")
	one, two := env.startAgentIn(pods[0]), env.startAgentIn(pods[1])
	has(0, "SlotsNotReported", "agents report no slots: their version may be older than slots")
	env.allocator.setSlots(one, 2, 2, "")
	env.allocator.setSlots(two, 0, 2, "")
	has(2, "SlotsRefilling", "agents have no free slot and are starting some")
	env.allocator.setSlots(two, 1, 2, "")
	has(3, "SlotsFree", "")
	env.allocator.setSlots(one, 0, 0, "the kernel has no fsopen")
	has(1, "SlotsOff", "1 of 2 agents keep no slots: the kernel has no fsopen")

	// A draining agent does not count.
	pod := env.pod(two.info.GetPodName())
	old := pod.DeepCopy()
	pod.Annotations = map[string]string{v1alpha1.AnnotationDraining: "maintenance"}
	require.NoError(t, kube.Patch(env.ctx, pod, client.MergeFrom(old)))
	has(0, "SlotsOff", "1 of 1 agents keep no slots: the kernel has no fsopen")

	// New Pods have the bounds, and a pool that disables slots has no condition.
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Slots = &v1alpha1.PoolSlots{Max: ptr.To(int32(0))} })
	off := corev1.EnvVar{Name: "AGENT_SLOTS_MAX", Value: "0"}
	env.eventually(func() bool {
		return slices.ContainsFunc(env.pods(), func(p corev1.Pod) bool { return slices.Contains(p.Spec.Containers[0].Env, off) })
	}, func() string { return "no agent has the bounds" })
	env.eventually(func() bool {
		return meta.FindStatusCondition(env.getPool().Status.Conditions, v1alpha1.ConditionSlotsReady) == nil
	}, func() string { return "the condition is not removed" })
	require.False(t, slices.ContainsFunc(pods, func(p corev1.Pod) bool { return slices.Contains(p.Spec.Containers[0].Env, off) }))
}

func TestStartPath(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	env.startAgentIn(env.waitForAgents(1)[0])
	env.sandbox("s")
	env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, v1alpha1.StartPathSlot, env.get("s").Status.StartPath)
}
