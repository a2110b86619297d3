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

// events are the notes of all Events with the reason.
func (w *world) events(reason string) []string {
	w.t.Helper()
	var list eventsv1.EventList
	require.NoError(w.t, kube.List(w.ctx, &list, client.InNamespace(w.namespace)))
	var out []string
	for _, e := range list.Items {
		if e.Reason == reason {
			out = append(out, e.Note)
		}
	}
	return out
}

func (w *world) tellsOnce(reason, words string) {
	w.t.Helper()
	w.eventually(func() bool { return len(w.events(reason)) > 0 }, func() string { return "no Event " + reason })
	require.Len(w.t, w.events(reason), 1)
	require.Contains(w.t, w.events(reason)[0], words)
}

func (w *world) changePool(change func(*v1alpha1.SandboxPool)) {
	w.t.Helper()
	p := w.getPool()
	old := p.DeepCopy()
	change(p)
	require.NoError(w.t, kube.Patch(w.ctx, p, client.MergeFrom(old)))
}

func (w *world) progresses(reason, words string) {
	w.t.Helper()
	var c metav1.Condition
	w.eventually(func() bool {
		c = poolCondition(w.getPool(), v1alpha1.ConditionProgressing)
		return c.Reason == reason && strings.Contains(c.Message, words)
	}, func() string { return "the condition Progressing says " + c.Reason + ": " + c.Message })
}

func isThere(pods []corev1.Pod, a *agent) bool {
	for _, p := range pods {
		if string(p.UID) == a.info.GetPodUid() {
			return true
		}
	}
	return false
}

// upOthers brings those Pods up that have no agent yet.
func (w *world) upOthers(known ...*agent) []*agent {
	w.t.Helper()
	var out []*agent
next:
	for _, p := range w.pods() {
		for _, a := range known {
			if a.info.GetPodUid() == string(p.UID) {
				continue next
			}
		}
		out = append(out, w.up(p))
	}
	return out
}

// TestRolloutKillsNobody: the template changes under a running sandbox. New agents come, new sandboxes go there, the old
// agent goes with its last sandbox.
func TestRolloutKillsNobody(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	old := w.up(w.settles(1)[0])
	w.runs("s", noPorts)
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	w.eventually(func() bool { return len(w.pods()) == 2 }, func() string { return "no agent of the new template" })
	w.progresses("RollingOut", "0 of 2 agents are of the present template and ready; none drains")
	require.False(t, old.isDraining(), "drained before the new agent was ready")
	fresh := w.upOthers(old)[0]
	w.eventually(old.isDraining, func() string { return "the old agent does not drain" })
	w.progresses("Draining", "1 agent drains and waits for 1 sandbox")
	require.Equal(t, int32(1), w.getPool().Status.DrainingAgents)
	require.Equal(t, v1alpha1.DrainOutdated, w.pod(old.info.GetPodName()).Annotations[v1alpha1.AnnotationDraining])
	s := w.runs("s2", noPorts)
	require.Equal(t, fresh.info.GetPodName(), s.Status.AssignedPod)
	w.stays(500*time.Millisecond, "the old agent went with a sandbox on it", func() bool { return isThere(w.pods(), old) })
	require.Equal(t, v1alpha1.PhaseRunning, w.get("s").Status.Phase)
	require.Equal(t, int64(1), w.get("s").Status.Attempt)
	require.Zero(t, old.deleteCalls())
	w.delete("s")
	w.eventually(func() bool { return !isThere(w.pods(), old) }, func() string { return "the empty agent stays" })
	w.progresses("Settled", "")
}

// TestTemplateThatIsChangedBack: the agent that drained serves again, and no third one is made.
func TestTemplateThatIsChangedBack(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	old := w.up(w.settles(1)[0])
	w.runs("s", noPorts)
	image := func(name string) {
		w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = name })
	}
	image("agent:2") // poolMax has no room: the old agent drains first
	w.eventually(old.isDraining, func() string { return "the old agent does not drain" })
	w.settles(2) // beyond poolMax, as long as it drains
	fresh := w.upOthers(old)[0]
	image("agent:test")
	w.eventually(func() bool { return !isThere(w.pods(), fresh) && !old.isDraining() }, func() string { return "it does not go back" })
	w.settles(1)
	require.Empty(t, w.pod(old.info.GetPodName()).Annotations[v1alpha1.AnnotationDraining])
	w.progresses("Settled", "")
	require.Equal(t, v1alpha1.PhaseRunning, w.get("s").Status.Phase)
}

// TestTemplateThatDoesNotWork stops the rollout before any old agent goes.
func TestTemplateThatDoesNotWork(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	w.settles(2)
	agents := w.upOthers()
	w.progresses("Settled", "")
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:broken" })
	w.settles(3) // never gets ready
	w.stays(700*time.Millisecond, "an old agent goes", func() bool {
		return !agents[0].isDraining() && !agents[1].isDraining() && len(w.pods()) == 3
	})
	// Put right: the broken one, which never started, goes at once.
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:test" })
	w.settles(2)
	require.True(t, isThere(w.pods(), agents[0]) && isThere(w.pods(), agents[1]))
}

// TestDemandComesBackToADrainingAgent: an idle agent was drained, in vain, for it had just been given a sandbox that the
// Registry had not heard of. It stays, and serves again when there is need for it.
func TestDemandComesBackToADrainingAgent(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 2, PoolMax: 2} })
	w.settles(2)
	agents := w.upOthers()
	for _, a := range agents {
		a.set(func(a *agent) { a.mute = true })
		fence := &agentv1.Fence{SandboxUid: "fast-" + a.info.GetPodName()[len(a.info.GetPodName())-5:], Attempt: 1, AgentUid: a.info.GetPodUid()}
		a.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence),
			Record: &agentv1.SandboxRecord{Fence: fence, Namespace: w.namespace, Name: "x"}})
	}
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 1 })
	drained := func() *agent {
		for _, a := range agents {
			if a.isDraining() {
				return a
			}
		}
		return nil
	}
	w.eventually(func() bool { return drained() != nil }, func() string { return "none drains" })
	w.progresses("Draining", "waits for 1 sandbox")
	w.stays(500*time.Millisecond, "an agent with a sandbox went", func() bool { return len(w.pods()) == 2 })
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 2 })
	w.eventually(func() bool { return drained() == nil }, func() string { return "it does not serve again" })
	w.settles(2)
	require.True(t, isThere(w.pods(), agents[0]) && isThere(w.pods(), agents[1]))
	w.progresses("Settled", "")
}

// TestAgentWithATombstoneStays: its deletions are not known to the API server yet.
func TestAgentWithATombstoneStays(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	a := w.up(w.settles(1)[0])
	a.set(func(a *agent) { a.sticky = []*agentv1.Tombstone{{Name: "gone"}} })
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMin = 0 })
	w.eventually(a.isDraining, func() string { return "does not drain" })
	w.stays(500*time.Millisecond, "it went with its tombstone", func() bool { return len(w.pods()) == 1 })
	a.set(func(a *agent) { a.sticky = nil })
	w.settles(0)
}

// TestReservationDoesNotHoldADrainedAgent: whoever holds it is refused there, so that the Pod does not wait for its end.
func TestReservationDoesNotHoldADrainedAgent(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	a := w.up(w.settles(1)[0])
	w.runs("s", noPorts)
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	w.settles(2)
	w.upOthers(a)
	w.eventually(a.isDraining, func() string { return "does not drain" })
	w.allocator.reserves(a, 2)
	w.progresses("Draining", "waits for 1 sandbox")
	w.stays(400*time.Millisecond, "it went with its sandbox", func() bool { return isThere(w.pods(), a) })
	w.delete("s")
	w.eventually(func() bool { return !isThere(w.pods(), a) }, func() string { return "the reservation holds it" })
}

// TestDrainOfAnAgentThatDoesNotAnswer: it may have sandboxes that nobody else knows of, and stays until its Pod has ended.
func TestDrainOfAnAgentThatDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	a := w.up(w.settles(1)[0])
	a.stop()
	w.allocator.silent(a, time.Now().Add(-time.Hour), false)
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{} })
	w.tellsOnce("DrainStuck", a.info.GetPodName())
	w.stays(500*time.Millisecond, "deleted on no evidence", func() bool { return len(w.pods()) == 1 })
	// It does not count: what is wanted again is made.
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1} })
	w.settles(2)
	require.Len(t, w.events("DrainStuck"), 1)
	pod := w.pod(a.info.GetPodName())
	old := pod.DeepCopy()
	pod.Status.Phase = corev1.PodFailed
	require.NoError(t, kube.Status().Patch(w.ctx, pod, client.MergeFrom(old)))
	w.settles(1)
}

// TestAgentThatCannotBeDrained is one of an earlier version, and has to be replaced all the same.
func TestAgentThatCannotBeDrained(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	a := w.up(w.settles(1)[0])
	a.set(func(a *agent) { a.old = true })
	w.runs("s", noPorts)
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Image = "agent:2" })
	w.settles(2)
	w.upOthers(a)
	w.progresses("Draining", "waits for 1 sandbox")
	w.stays(400*time.Millisecond, "it went with its sandbox", func() bool { return len(w.pods()) == 2 })
	w.delete("s")
	w.eventually(func() bool { return !isThere(w.pods(), a) }, func() string { return "it stays" })
}

// TestDrainByHand: a person drains an agent by its annotation. It goes when it is empty, and another one comes.
func TestDrainByHand(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	a := w.up(w.settles(1)[0])
	w.runs("s", noPorts)
	mark := func(reason *string) {
		pod := w.pod(a.info.GetPodName())
		old := pod.DeepCopy()
		delete(pod.Annotations, v1alpha1.AnnotationDraining)
		if reason != nil {
			pod.Annotations = map[string]string{v1alpha1.AnnotationDraining: *reason}
		}
		require.NoError(t, kube.Patch(w.ctx, pod, client.MergeFrom(old)))
	}
	word := "disk is failing"
	mark(&word)
	w.eventually(a.isDraining, func() string { return "does not drain" })
	w.settles(2)
	mark(nil)
	w.eventually(func() bool { return !a.isDraining() }, func() string { return "does not serve again" })
	mark(&word)
	w.eventually(a.isDraining, func() string { return "does not drain again" })
	w.delete("s")
	w.eventually(func() bool { return !isThere(w.pods(), a) }, func() string { return "it does not go" })
}

func TestDeletedPoolDrains(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 2, PoolMax: 2} })
	w.settles(2)
	w.upOthers()
	s := w.runs("s", noPorts)
	done := w.runs("done", noPorts)
	var on *agent
	for _, a := range w.allocator.all() {
		if a.info.GetPodName() == s.Status.AssignedPod {
			on = a
		}
	}
	require.Equal(t, s.Status.AssignedPod, done.Status.AssignedPod)
	w.ends(on, string(done.UID)+"-1", 0, "Completed")
	require.NoError(t, kube.Delete(w.ctx, w.getPool()))
	w.eventually(func() bool { return len(w.pods()) == 1 }, func() string { return "the idle agent stays" })
	require.True(t, isThere(w.pods(), on), "the agent with the sandboxes went")
	w.progresses("Deleting", "1 agent drains and waits for 2 sandboxes, of which 1 ended and only have to be deleted")
	w.tellsOnce("Deleting", "being deleted")
	require.Equal(t, metav1.ConditionFalse, poolCondition(w.getPool(), v1alpha1.ConditionReady).Status)
	w.stays(400*time.Millisecond, "a sandbox ended with its pool", func() bool { return w.get("s").Status.Phase == v1alpha1.PhaseRunning && len(w.pods()) == 1 })
	w.delete("done")
	w.delete("s")
	w.eventually(func() bool {
		return !w.poolIsThere() && len(w.pods()) == 0
	}, func() string { return "the pool stays" })
}

func (w *world) poolIsThere() bool {
	return kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: "pool"}, &v1alpha1.SandboxPool{}) == nil
}

// TestNamespaceGoesWithEverythingInIt deletes what a namespace's controller deletes, all at once: the finalizers of pool
// and sandboxes do not wait for each other.
func TestNamespaceGoesWithEverythingInIt(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	a := w.up(w.settles(1)[0])
	w.runs("s", noPorts)
	w.fast(a, "f", 1, noPorts)
	w.reachesPhase("f", v1alpha1.PhaseRunning)
	require.NoError(t, kube.DeleteAllOf(w.ctx, &v1alpha1.SandboxPool{}, client.InNamespace(w.namespace)))
	require.NoError(t, kube.DeleteAllOf(w.ctx, &v1alpha1.Sandbox{}, client.InNamespace(w.namespace)))
	a.stop()
	require.NoError(t, kube.DeleteAllOf(w.ctx, &corev1.Pod{}, client.InNamespace(w.namespace), client.GracePeriodSeconds(0)))
	w.allocator.gone(a)
	w.vanishes("s")
	w.vanishes("f")
	w.eventually(func() bool { return !w.poolIsThere() }, func() string { return "the pool stays" })
	require.Empty(t, w.pods())
}
