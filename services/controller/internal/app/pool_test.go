//go:build integration

package app_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/scale"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func (w *world) pool(change ...func(*v1alpha1.SandboxPool)) *v1alpha1.SandboxPool {
	w.t.Helper()
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "pool"}, Spec: v1alpha1.SandboxPoolSpec{
		Capacity: v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 4, BufferMin: 1, BufferMax: 4}, MaxSandboxesPerPod: 2,
		AgentTemplate: v1alpha1.AgentTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "agent:test"}}}},
	}}
	for _, c := range change {
		c(p)
	}
	require.NoError(w.t, kube.Create(w.ctx, p))
	return p
}

func (w *world) getPool() *v1alpha1.SandboxPool {
	w.t.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(w.t, kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: "pool"}, &p))
	return &p
}

// pods are the pool's agent Pods that are not on their way out.
func (w *world) pods() []corev1.Pod {
	w.t.Helper()
	var list corev1.PodList
	require.NoError(w.t, kube.List(w.ctx, &list, client.InNamespace(w.namespace), client.MatchingLabels{v1alpha1.LabelPool: "pool"}))
	var out []corev1.Pod
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

func (w *world) settles(n int) []corev1.Pod {
	w.t.Helper()
	w.eventually(func() bool { return len(w.pods()) == n && int(w.getPool().Status.CurrentAgents) == n },
		func() string { return "the pool has not the agents that it should have" })
	w.stays(300*time.Millisecond, "the pool does not settle", func() bool { return len(w.pods()) == n })
	return w.pods()
}

// up makes an agent run in a Pod that the controller made, as a kubelet and the Registry would have it.
func (w *world) up(p corev1.Pod) *agent {
	w.t.Helper()
	old := p.DeepCopy()
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	require.NoError(w.t, kube.Status().Patch(w.ctx, &p, client.MergeFrom(old)))
	a := startAgent(w.t, &agentv1.AgentInfo{PodName: p.Name, PodUid: string(p.UID), Namespace: w.namespace, Pool: "pool", NodeName: "node-1", Capacity: 2}, w.allocator)
	w.allocator.add(a)
	return a
}

func poolCondition(p *v1alpha1.SandboxPool, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

func TestPoolKeepsItsAgents(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	pods := w.settles(1)
	require.True(t, metav1.IsControlledBy(&pods[0], w.getPool()))
	require.Contains(t, pods[0].Name, "pool-agent-")
	require.Equal(t, metav1.ConditionFalse, poolCondition(w.getPool(), v1alpha1.ConditionReady).Status)

	w.up(pods[0])
	w.eventually(func() bool {
		p := w.getPool()
		return poolCondition(p, v1alpha1.ConditionReady).Status == metav1.ConditionTrue &&
			poolCondition(p, v1alpha1.ConditionProgressing).Status == metav1.ConditionFalse && p.Status.Capacity == 2 && p.Status.FreeCapacity == 2
	}, func() string { return "the pool is not ready" })
	require.Equal(t, w.getPool().Generation, w.getPool().Status.ObservedGeneration)

	// A Pod that is deleted is replaced, and so is one that has failed.
	require.NoError(t, kube.Delete(w.ctx, &pods[0], client.GracePeriodSeconds(0)))
	w.eventually(func() bool { p := w.pods(); return len(p) == 1 && p[0].UID != pods[0].UID }, func() string { return "not replaced" })
	failed := w.settles(1)[0]
	old := failed.DeepCopy()
	failed.Status.Phase = corev1.PodFailed
	require.NoError(t, kube.Status().Patch(w.ctx, &failed, client.MergeFrom(old)))
	w.eventually(func() bool { p := w.pods(); return len(p) == 1 && p[0].UID != failed.UID }, func() string { return "a failed agent is not replaced" })
}

// TestScale goes the way of `kubectl scale` and of the horizontal autoscaler.
func TestScale(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool()
	w.settles(1)
	d, err := discovery.NewDiscoveryClientForConfig(adminConf)
	require.NoError(t, err)
	scales, err := scale.NewForConfig(adminConf, kube.RESTMapper(), dynamic.LegacyAPIPathResolverFunc, scale.NewDiscoveryScaleKindResolver(d))
	require.NoError(t, err)
	pools := schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxpools"}
	current, err := scales.Scales(w.namespace).Get(w.ctx, pools, "pool", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, int32(1), current.Spec.Replicas)
	require.Equal(t, int32(1), current.Status.Replicas)
	selected, err := labels.Parse(current.Status.Selector)
	require.NoError(t, err)
	require.True(t, selected.Matches(labels.Set(w.pods()[0].Labels)))

	to := func(n int32) error {
		patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, n)
		_, err := scales.Scales(w.namespace).Patch(w.ctx, pools.WithVersion("v1alpha1"), "pool", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	require.NoError(t, to(3))
	w.settles(3)
	require.Equal(t, int32(3), w.getPool().Spec.Capacity.PoolMin)
	err = to(9)
	require.True(t, apierrors.IsInvalid(err), "%v", err)
	require.ErrorContains(t, err, "poolMin must not exceed poolMax: to scale further, raise poolMax first")
	w.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.BufferMax = 1 })
	require.NoError(t, to(1))
	w.settles(1)
}

func TestPoolGrowsAndShrinksWithItsLoad(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.BufferMax = 2 })
	first := w.up(w.settles(1)[0])
	// Two sandboxes fill the first agent: the buffer of one place needs a second one.
	w.sandbox("s1", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	w.sandbox("s2", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	w.reachesPhase("s1", v1alpha1.PhaseRunning)
	w.reachesPhase("s2", v1alpha1.PhaseRunning)
	pods := w.settles(2)
	w.eventually(func() bool { return w.getPool().Status.ActiveSandboxes == 2 }, func() string { return "its sandboxes are not counted" })
	var second *agent
	for _, p := range pods {
		if string(p.UID) != first.info.GetPodUid() {
			second = w.up(p)
		}
	}
	// A fast sandbox has no resource yet: the agent's report alone keeps the agent.
	fence := &agentv1.Fence{SandboxUid: "fast-x", Attempt: 1, AgentUid: second.info.GetPodUid()}
	second.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence),
		Record: &agentv1.SandboxRecord{Fence: fence, Namespace: w.namespace, Name: "x"}})
	w.delete("s1")
	w.delete("s2")
	w.vanishes("s1")
	w.vanishes("s2")
	// One sandbox and one buffered place fit one agent. The first is idle and goes, the second has the sandbox and stays.
	w.eventually(func() bool { return len(w.pods()) == 1 }, func() string { return "the idle agent stays" })
	require.Equal(t, second.info.GetPodUid(), string(w.pods()[0].UID), "the agent with the sandbox went")
}

func TestPoolGrowsForAPortThatIsTaken(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.MaxSandboxesPerPod = 10 })
	w.settles(1)
	w.sandbox("s1")
	w.sandbox("s2") // the same port: places are left, but not for it
	w.settles(2)
}

func TestPoolWithABadTemplateSaysSo(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.pool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Name = "other" })
	w.eventually(func() bool { return poolCondition(w.getPool(), v1alpha1.ConditionReady).Reason == "InvalidTemplate" }, func() string { return "not told" })
	require.Contains(t, poolCondition(w.getPool(), v1alpha1.ConditionReady).Message, "named agent")
	require.Empty(t, w.pods())
	p := w.getPool()
	old := p.DeepCopy()
	p.Spec.AgentTemplate.Spec.Containers[0].Name = "agent"
	require.NoError(t, kube.Patch(w.ctx, p, client.MergeFrom(old)))
	w.settles(1)
}

func TestPoolHasItsCertificate(t *testing.T) {
	w := newWorld(t)
	w.config.TLS.Insecure = false
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: systemNamespace, Name: "agent-tls"}, Data: map[string][]byte{"tls.crt": []byte("one")}}
	require.NoError(t, kube.Create(w.ctx, secret))
	t.Cleanup(func() { require.NoError(t, kube.Delete(context.WithoutCancel(w.ctx), secret)) })
	// Somebody's own Secret of that name is left alone.
	own := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "agent-tls"}, Data: map[string][]byte{"x": []byte("mine")}}
	require.NoError(t, kube.Create(w.ctx, own))
	w.start()
	w.pool()
	w.eventually(func() bool { return poolCondition(w.getPool(), v1alpha1.ConditionReady).Reason == "SecretConflict" }, func() string { return "not told" })
	require.NoError(t, kube.Delete(w.ctx, own))
	p := w.getPool()
	old := p.DeepCopy()
	p.Spec.Capacity.BufferMax = 5 // any change has the pool looked at again
	require.NoError(t, kube.Patch(w.ctx, p, client.MergeFrom(old)))
	pods := w.settles(1)
	require.Equal(t, "agent-tls", pods[0].Spec.Volumes[len(pods[0].Spec.Volumes)-1].Secret.SecretName)

	has := func(want string) func() bool {
		return func() bool {
			var mirror corev1.Secret
			err := kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: "agent-tls"}, &mirror)
			return err == nil && string(mirror.Data["tls.crt"]) == want
		}
	}
	w.eventually(has("one"), func() string { return "no copy" })
	secret.Data["tls.crt"] = []byte("two")
	require.NoError(t, kube.Update(w.ctx, secret))
	w.eventually(has("two"), func() string { return "the copy is not brought up to date" })
}
