//go:build integration

package app_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func noPorts(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil }

// events returns the notes of all Events with the reason.
func (env *testEnv) events(reason string) []string {
	env.t.Helper()
	var list eventsv1.EventList
	require.NoError(env.t, kube.List(env.ctx, &list, client.InNamespace(env.namespace)))
	var out []string
	for _, e := range list.Items {
		if e.Reason == reason {
			out = append(out, e.Note)
		}
	}
	return out
}

func (env *testEnv) hasOneEvent(reason, words string) {
	env.t.Helper()
	env.eventually(func() bool { return len(env.events(reason)) > 0 }, func() string { return "no Event " + reason })
	require.Len(env.t, env.events(reason), 1)
	require.Contains(env.t, env.events(reason)[0], words)
}

func (env *testEnv) changePool(change func(*v1alpha1.SandboxPool)) {
	env.t.Helper()
	p := env.getPool()
	old := p.DeepCopy()
	change(p)
	require.NoError(env.t, kube.Patch(env.ctx, p, client.MergeFrom(old)))
}

func (env *testEnv) waitForProgressing(reason, words string) {
	env.t.Helper()
	var c metav1.Condition
	env.eventually(func() bool {
		c = poolCondition(env.getPool(), v1alpha1.ConditionProgressing)
		return c.Reason == reason && strings.Contains(c.Message, words)
	}, func() string { return "the condition Progressing says " + c.Reason + ": " + c.Message })
}

func hasPodOf(pods []corev1.Pod, a *agent) bool {
	for _, p := range pods {
		if string(p.UID) == a.info.GetPodUid() {
			return true
		}
	}
	return false
}

// startOtherAgents starts agents in the Pods that have none.
func (env *testEnv) startOtherAgents(known ...*agent) []*agent {
	env.t.Helper()
	var out []*agent
next:
	for _, p := range env.pods() {
		for _, a := range known {
			if a.info.GetPodUid() == string(p.UID) {
				continue next
			}
		}
		out = append(out, env.startAgentIn(p))
	}
	return out
}

// TestRolloutKeepsSandboxes: after a change of the template, new sandboxes are placed on new agents, and the old agent is
// deleted after its last sandbox.
func TestRolloutKeepsSandboxes(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	old := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	env.eventually(func() bool { return len(env.pods()) == 2 }, func() string { return "no agent of the new template" })
	env.waitForProgressing("RollingOut", "0 of 2 agents are ready and up to date with the template; no agent is draining")
	require.False(t, old.isDraining(), "drained before the new agent was ready")
	fresh := env.startOtherAgents(old)[0]
	env.eventually(old.isDraining, func() string { return "the old agent is not drained" })
	env.waitForProgressing("Draining", "1 agent is draining, waiting for 1 sandbox")
	require.Equal(t, int32(1), env.getPool().Status.DrainingAgents)
	require.Equal(t, v1alpha1.DrainOutdated, env.pod(old.info.GetPodName()).Annotations[v1alpha1.AnnotationDraining])
	s := env.runSandbox("s2", noPorts)
	require.Equal(t, fresh.info.GetPodName(), s.Status.AssignedPod)
	env.consistently(500*time.Millisecond, "the old agent was deleted with a sandbox", func() bool { return hasPodOf(env.pods(), old) })
	require.Equal(t, v1alpha1.PhaseRunning, env.get("s").Status.Phase)
	require.Equal(t, int64(1), env.get("s").Status.Attempt)
	require.Zero(t, old.deleteCalls())
	env.delete("s")
	env.eventually(func() bool { return !hasPodOf(env.pods(), old) }, func() string { return "the empty agent is not deleted" })
	env.waitForProgressing("Settled", "")
}

// TestTemplateChangedBack: the draining agent is resumed, and no other one is created.
func TestTemplateChangedBack(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	old := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	image := func(name string) {
		env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = name })
	}
	image("agent:2") // poolMax has no room: the old agent drains first
	env.eventually(old.isDraining, func() string { return "the old agent is not drained" })
	env.waitForAgents(2) // beyond poolMax, as long as it drains
	fresh := env.startOtherAgents(old)[0]
	image("agent:test")
	env.eventually(func() bool { return !hasPodOf(env.pods(), fresh) && !old.isDraining() }, func() string { return "the rollout is not reverted" })
	env.waitForAgents(1)
	require.Empty(t, env.pod(old.info.GetPodName()).Annotations[v1alpha1.AnnotationDraining])
	env.waitForProgressing("Settled", "")
	require.Equal(t, v1alpha1.PhaseRunning, env.get("s").Status.Phase)
}

// TestBrokenTemplate: the rollout stops before an old agent is drained.
func TestBrokenTemplate(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	env.waitForAgents(2)
	agents := env.startOtherAgents()
	env.waitForProgressing("Settled", "")
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:broken" })
	env.waitForAgents(3) // never gets ready
	env.consistently(700*time.Millisecond, "an old agent is drained", func() bool {
		return !agents[0].isDraining() && !agents[1].isDraining() && len(env.pods()) == 3
	})
	// After the template is corrected, the broken agent, which never started, is deleted at once.
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:test" })
	env.waitForAgents(2)
	require.True(t, hasPodOf(env.pods(), agents[0]) && hasPodOf(env.pods(), agents[1]))
}

// TestDrainingAgentIsResumed: an idle agent is drained, but has just got a sandbox that the Registry does not know of yet. It
// stays, and is resumed when the pool needs it.
func TestDrainingAgentIsResumed(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 2, PoolMax: 2} })
	env.waitForAgents(2)
	agents := env.startOtherAgents()
	for _, a := range agents {
		a.set(func(a *agent) { a.unreported = true })
		fence := &agentv1.Fence{SandboxUid: "fast-" + a.info.GetPodName()[len(a.info.GetPodName())-5:], Attempt: 1, AgentUid: a.info.GetPodUid()}
		a.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence),
			Record: &agentv1.SandboxRecord{Fence: fence, Namespace: env.namespace, Name: "x"}})
	}
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 1 })
	drained := func() *agent {
		for _, a := range agents {
			if a.isDraining() {
				return a
			}
		}
		return nil
	}
	env.eventually(func() bool { return drained() != nil }, func() string { return "no agent is draining" })
	env.waitForProgressing("Draining", "waiting for 1 sandbox")
	env.consistently(500*time.Millisecond, "an agent with a sandbox was deleted", func() bool { return len(env.pods()) == 2 })
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	env.eventually(func() bool { return drained() == nil }, func() string { return "it is not resumed" })
	env.waitForAgents(2)
	require.True(t, hasPodOf(env.pods(), agents[0]) && hasPodOf(env.pods(), agents[1]))
	env.waitForProgressing("Settled", "")
}

// TestDrainWaitsForTombstones: the API server does not know of the agent's deletions yet.
func TestDrainWaitsForTombstones(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	a := env.startAgentIn(env.waitForAgents(1)[0])
	deleted := &agentv1.Fence{SandboxUid: "gone", Attempt: 1, AgentUid: a.info.GetPodUid()}
	a.fake.AddTombstone(&agentv1.Tombstone{Name: "gone", Fence: deleted})
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 0 })
	env.eventually(a.isDraining, func() string { return "it is not drained" })
	env.consistently(500*time.Millisecond, "it was deleted with its tombstone", func() bool { return len(env.pods()) == 1 })
	_, err := a.ForgetTombstone(t.Context(), &agentv1.ForgetTombstoneRequest{Fence: deleted})
	require.NoError(t, err)
	env.waitForAgents(0)
}

// TestDrainIgnoresReservations: the agent refuses their holders.
func TestDrainIgnoresReservations(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	env.waitForAgents(2)
	env.startOtherAgents(a)
	env.eventually(a.isDraining, func() string { return "it is not drained" })
	env.allocator.setReserved(a, 2)
	env.waitForProgressing("Draining", "waiting for 1 sandbox")
	env.consistently(400*time.Millisecond, "it was deleted with its sandbox", func() bool { return hasPodOf(env.pods(), a) })
	env.delete("s")
	env.eventually(func() bool { return !hasPodOf(env.pods(), a) }, func() string { return "it is not deleted" })
}

// TestDrainOfSilentAgent: it may have sandboxes that are known to no other component, and stays until its Pod terminates.
func TestDrainOfSilentAgent(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	a.stop()
	env.allocator.setHeartbeat(a, time.Now().Add(-time.Hour), false)
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{} })
	env.hasOneEvent("DrainStuck", a.info.GetPodName())
	env.consistently(500*time.Millisecond, "deleted although it may have sandboxes", func() bool { return len(env.pods()) == 1 })
	// It does not count: a new agent is created instead.
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	env.waitForAgents(2)
	require.Len(t, env.events("DrainStuck"), 1)
	pod := env.pod(a.info.GetPodName())
	old := pod.DeepCopy()
	pod.Status.Phase = corev1.PodFailed
	require.NoError(t, kube.Status().Patch(env.ctx, pod, client.MergeFrom(old)))
	env.waitForAgents(1)
}

// TestAgentWithoutDrain: an agent of an earlier version is replaced, too.
func TestAgentWithoutDrain(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	a.set(func(a *agent) { a.cannotDrain = true })
	env.runSandbox("s", noPorts)
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	env.waitForAgents(2)
	env.startOtherAgents(a)
	env.waitForProgressing("Draining", "waiting for 1 sandbox")
	env.consistently(400*time.Millisecond, "it was deleted with its sandbox", func() bool { return len(env.pods()) == 2 })
	env.delete("s")
	env.eventually(func() bool { return !hasPodOf(env.pods(), a) }, func() string { return "it is not deleted" })
}

// TestManualDrain: a person annotates the Pod. Another agent is created, and the Pod is deleted when it is empty.
func TestManualDrain(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	mark := func(reason *string) {
		pod := env.pod(a.info.GetPodName())
		old := pod.DeepCopy()
		delete(pod.Annotations, v1alpha1.AnnotationDraining)
		if reason != nil {
			pod.Annotations = map[string]string{v1alpha1.AnnotationDraining: *reason}
		}
		require.NoError(t, kube.Patch(env.ctx, pod, client.MergeFrom(old)))
	}
	reason := "disk is failing"
	mark(&reason)
	env.eventually(a.isDraining, func() string { return "it is not drained" })
	env.waitForAgents(2)
	mark(nil)
	env.eventually(func() bool { return !a.isDraining() }, func() string { return "it is not resumed" })
	mark(&reason)
	env.eventually(a.isDraining, func() string { return "it is not drained again" })
	env.delete("s")
	env.eventually(func() bool { return !hasPodOf(env.pods(), a) }, func() string { return "it is not deleted" })
}

func TestDeletedPoolDrains(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 2, PoolMax: 2} })
	env.waitForAgents(2)
	env.startOtherAgents()
	s := env.runSandbox("s", noPorts)
	done := env.runSandbox("done", noPorts)
	var on *agent
	for _, a := range env.allocator.all() {
		if a.info.GetPodName() == s.Status.AssignedPod {
			on = a
		}
	}
	require.Equal(t, s.Status.AssignedPod, done.Status.AssignedPod)
	env.exitProcess(on, string(done.UID)+"-1", 0, "Completed")
	require.NoError(t, kube.Delete(env.ctx, env.getPool()))
	env.eventually(func() bool { return len(env.pods()) == 1 }, func() string { return "the idle agent is not deleted" })
	require.True(t, hasPodOf(env.pods(), on), "the agent with the sandboxes was deleted")
	env.waitForProgressing("Deleting", "1 agent is draining, waiting for 2 sandboxes, of which 1 ended and will be deleted after ttlAfterFinished")
	env.hasOneEvent("Deleting", "being deleted")
	require.Equal(t, metav1.ConditionFalse, poolCondition(env.getPool(), v1alpha1.ConditionReady).Status)
	env.consistently(400*time.Millisecond, "a sandbox was removed with its pool", func() bool { return env.get("s").Status.Phase == v1alpha1.PhaseRunning && len(env.pods()) == 1 })
	env.delete("done")
	env.delete("s")
	env.eventually(func() bool {
		return !env.poolExists() && len(env.pods()) == 0
	}, func() string { return "the pool is not removed" })
}

func (env *testEnv) poolExists() bool {
	return kube.Get(env.ctx, client.ObjectKey{Namespace: env.namespace, Name: "pool"}, &v1alpha1.SandboxPool{}) == nil
}

// TestNamespaceDeletion deletes all resources of a namespace at once: the finalizers of pools and sandboxes do not wait for
// each other, nor for the rights of the controller, which are deleted too.
func TestNamespaceDeletion(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	a := env.startAgentIn(env.waitForAgents(1)[0])
	env.runSandbox("s", noPorts)
	env.fastSandbox(a, "f", 1, noPorts)
	env.waitForPhase("f", v1alpha1.PhaseRunning)
	require.NoError(t, kube.Delete(env.ctx, env.binding()))
	require.NoError(t, kube.DeleteAllOf(env.ctx, &v1alpha1.SandboxPool{}, client.InNamespace(env.namespace)))
	require.NoError(t, kube.DeleteAllOf(env.ctx, &v1alpha1.Sandbox{}, client.InNamespace(env.namespace)))
	a.stop()
	require.NoError(t, kube.DeleteAllOf(env.ctx, &corev1.Pod{}, client.InNamespace(env.namespace), client.GracePeriodSeconds(0)))
	env.allocator.remove(a)
	env.waitForRemoval("s")
	env.waitForRemoval("f")
	env.eventually(func() bool { return !env.poolExists() }, func() string { return "the pool is not removed" })
	require.Empty(t, env.pods())
}
