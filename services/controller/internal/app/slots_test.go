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

// TestPoolTellsOfItsSlots: status and condition follow what agents say, and the pool's bounds reach the agents.
func TestPoolTellsOfItsSlots(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	pods := w.settles(2)
	tells := func(ready int32, reason, message string) {
		t.Helper()
		w.eventually(func() bool {
			p := w.getPool()
			c := poolCondition(p, v1alpha1.ConditionSlotsReady)
			return p.Status.ReadySlots == ready && c.Reason == reason && c.Message == message && (c.Status == "True") == (reason == "SlotsFree")
		}, func() string { return "not told: " + reason + " " + message })
	}
	tells(0, "AgentsNotReady", "no agent is ready")
	one, two := w.up(pods[0]), w.up(pods[1])
	tells(0, "SlotsNotReported", "agents tell of no slots: their image may be older than slots are")
	w.allocator.slots(one, 2, 2, "")
	w.allocator.slots(two, 0, 2, "")
	tells(2, "SlotsRefilling", "agents have no slot free and are starting some")
	w.allocator.slots(two, 1, 2, "")
	tells(3, "SlotsFree", "")
	w.allocator.slots(one, 0, 0, "the kernel has no fsopen")
	tells(1, "SlotsOff", "1 of 2 agents keep no slots: the kernel has no fsopen")

	// An agent that drains counts no more: its slots are nobody's.
	pod := w.pod(two.info.GetPodName())
	old := pod.DeepCopy()
	pod.Annotations = map[string]string{v1alpha1.AnnotationDraining: "maintenance"}
	require.NoError(t, kube.Patch(w.ctx, pod, client.MergeFrom(old)))
	tells(0, "SlotsOff", "1 of 1 agents keep no slots: the kernel has no fsopen")

	// Bounds reach agents by new Pods, and a pool that wants no slots has nothing to say of them.
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Slots = &v1alpha1.PoolSlots{Max: ptr.To(int32(0))} })
	off := corev1.EnvVar{Name: "AGENT_SLOTS_MAX", Value: "0"}
	w.eventually(func() bool {
		return slices.ContainsFunc(w.pods(), func(p corev1.Pod) bool { return slices.Contains(p.Spec.Containers[0].Env, off) })
	}, func() string { return "no agent has the bounds" })
	w.eventually(func() bool {
		return meta.FindStatusCondition(w.getPool().Status.Conditions, v1alpha1.ConditionSlotsReady) == nil
	}, func() string { return "the condition of a pool without slots stays" })
	require.False(t, slices.ContainsFunc(pods, func(p corev1.Pod) bool { return slices.Contains(p.Spec.Containers[0].Env, off) }))
}

// TestStartPathIsKept: a Sandbox tells how its container came to run.
func TestStartPathIsKept(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	w.up(w.settles(1)[0])
	w.sandbox("s")
	w.reachesPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, v1alpha1.StartPathSlot, w.get("s").Status.StartPath)
}
