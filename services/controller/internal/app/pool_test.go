//go:build integration

package app_test

import (
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

func (env *testEnv) pool(change ...func(*v1alpha1.SandboxPool)) *v1alpha1.SandboxPool {
	env.t.Helper()
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: "pool"}, Spec: v1alpha1.SandboxPoolSpec{
		Capacity: v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 4, BufferMin: 1, BufferMax: 4}, MaxSandboxesPerPod: 2,
		AgentTemplate: v1alpha1.AgentTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "agent:test"}}}},
	}}
	for _, c := range change {
		c(p)
	}
	require.NoError(env.t, kube.Create(env.ctx, p))
	return p
}

func (env *testEnv) getPool() *v1alpha1.SandboxPool {
	env.t.Helper()
	var p v1alpha1.SandboxPool
	require.NoError(env.t, kube.Get(env.ctx, client.ObjectKey{Namespace: env.namespace, Name: "pool"}, &p))
	return &p
}

// pods returns the pool's agent Pods that are not being deleted.
func (env *testEnv) pods() []corev1.Pod {
	env.t.Helper()
	var list corev1.PodList
	require.NoError(env.t, kube.List(env.ctx, &list, client.InNamespace(env.namespace), client.MatchingLabels{v1alpha1.LabelPool: "pool"}))
	var out []corev1.Pod
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			out = append(out, p)
		}
	}
	return out
}

func (env *testEnv) waitForAgents(n int) []corev1.Pod {
	env.t.Helper()
	env.eventually(func() bool { return len(env.pods()) == n && int(env.getPool().Status.CurrentAgents) == n },
		func() string { return "the pool has a different number of agents" })
	env.consistently(300*time.Millisecond, "the number of agents changes", func() bool { return len(env.pods()) == n })
	return env.pods()
}

// bind assigns a Pod to a node, as the scheduler does.
func (env *testEnv) bind(p corev1.Pod, node string) corev1.Pod {
	env.t.Helper()
	require.NoError(env.t, kube.SubResource("binding").Create(env.ctx, &p, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: node}}))
	return *env.pod(p.Name)
}

// startAgentIn starts an agent in a Pod of the controller, and makes the Pod ready.
func (env *testEnv) startAgentIn(p corev1.Pod) *agent {
	env.t.Helper()
	old := p.DeepCopy()
	p.Status.Phase = corev1.PodRunning
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	require.NoError(env.t, kube.Status().Patch(env.ctx, &p, client.MergeFrom(old)))
	a := startAgent(env.t, &agentv1.AgentInfo{PodName: p.Name, PodUid: string(p.UID), Namespace: env.namespace, Pool: "pool", NodeName: "node-1", Capacity: 2}, env.allocator)
	env.allocator.add(a)
	return a
}

func poolCondition(p *v1alpha1.SandboxPool, kind string) metav1.Condition {
	if c := meta.FindStatusCondition(p.Status.Conditions, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}

func TestPoolKeepsItsAgents(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	pods := env.waitForAgents(1)
	require.True(t, metav1.IsControlledBy(&pods[0], env.getPool()))
	require.Contains(t, pods[0].Name, "pool-agent-")
	require.Equal(t, metav1.ConditionFalse, poolCondition(env.getPool(), v1alpha1.ConditionReady).Status)

	env.startAgentIn(pods[0])
	env.eventually(func() bool {
		p := env.getPool()
		return poolCondition(p, v1alpha1.ConditionReady).Status == metav1.ConditionTrue &&
			poolCondition(p, v1alpha1.ConditionProgressing).Status == metav1.ConditionFalse && p.Status.Capacity == 2 && p.Status.FreeCapacity == 2
	}, func() string { return "the pool is not ready" })
	require.Equal(t, env.getPool().Generation, env.getPool().Status.ObservedGeneration)

	// A Pod that is deleted or has failed is replaced.
	require.NoError(t, kube.Delete(env.ctx, &pods[0], client.GracePeriodSeconds(0)))
	env.eventually(func() bool { p := env.pods(); return len(p) == 1 && p[0].UID != pods[0].UID }, func() string { return "not replaced" })
	failed := env.waitForAgents(1)[0]
	old := failed.DeepCopy()
	failed.Status.Phase = corev1.PodFailed
	require.NoError(t, kube.Status().Patch(env.ctx, &failed, client.MergeFrom(old)))
	env.eventually(func() bool { p := env.pods(); return len(p) == 1 && p[0].UID != failed.UID }, func() string { return "a failed agent is not replaced" })
}

// TestScale uses the scale subresource, like `kubectl scale` and the horizontal autoscaler.
func TestScale(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool()
	env.waitForAgents(1)
	d, err := discovery.NewDiscoveryClientForConfig(adminConf)
	require.NoError(t, err)
	scales, err := scale.NewForConfig(adminConf, kube.RESTMapper(), dynamic.LegacyAPIPathResolverFunc, scale.NewDiscoveryScaleKindResolver(d))
	require.NoError(t, err)
	pools := schema.GroupResource{Group: v1alpha1.Group, Resource: "sandboxpools"}
	current, err := scales.Scales(env.namespace).Get(env.ctx, pools, "pool", metav1.GetOptions{})
	require.NoError(t, err)
	require.Equal(t, int32(1), current.Spec.Replicas)
	require.Equal(t, int32(1), current.Status.Replicas)
	selected, err := labels.Parse(current.Status.Selector)
	require.NoError(t, err)
	require.True(t, selected.Matches(labels.Set(env.pods()[0].Labels)))

	to := func(n int32) error {
		patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, n)
		_, err := scales.Scales(env.namespace).Patch(env.ctx, pools.WithVersion("v1alpha1"), "pool", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	require.NoError(t, to(3))
	env.waitForAgents(3)
	require.Equal(t, int32(3), env.getPool().Spec.Capacity.PoolMin)
	err = to(9)
	require.True(t, apierrors.IsInvalid(err), "%v", err)
	require.ErrorContains(t, err, "poolMin must not exceed poolMax: to scale further, raise poolMax first")
	env.changePool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.BufferMax = 1 })
	require.NoError(t, to(1))
	env.waitForAgents(1)
}

func TestPoolGrowsAndShrinksWithItsLoad(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.BufferMax = 2 })
	first := env.startAgentIn(env.waitForAgents(1)[0])
	// Two sandboxes fill the first agent: bufferMin needs a second one.
	env.sandbox("s1", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	env.sandbox("s2", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	env.waitForPhase("s1", v1alpha1.PhaseRunning)
	env.waitForPhase("s2", v1alpha1.PhaseRunning)
	pods := env.waitForAgents(2)
	env.eventually(func() bool { return env.getPool().Status.ActiveSandboxes == 2 }, func() string { return "activeSandboxes is not 2" })
	var second *agent
	for _, p := range pods {
		if string(p.UID) != first.info.GetPodUid() {
			second = env.startAgentIn(p)
		}
	}
	// A fast sandbox without a resource keeps its agent by the agent's report.
	fence := &agentv1.Fence{SandboxUid: "fast-x", Attempt: 1, AgentUid: second.info.GetPodUid()}
	second.put(&agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(fence),
		Record: &agentv1.SandboxRecord{Fence: fence, Namespace: env.namespace, Name: "x"}})
	env.delete("s1")
	env.delete("s2")
	env.waitForRemoval("s1")
	env.waitForRemoval("s2")
	// One sandbox and bufferMin fit one agent. The first is idle and is deleted, the second has the sandbox.
	env.eventually(func() bool { return len(env.pods()) == 1 }, func() string { return "the idle agent is not deleted" })
	require.Equal(t, second.info.GetPodUid(), string(env.pods()[0].UID), "the agent with the sandbox was deleted")
}

func TestPoolGrowsForPortConflict(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.MaxSandboxesPerPod = 10 })
	env.waitForAgents(1)
	env.sandbox("s1")
	env.sandbox("s2") // the same port: there is capacity, but not for this port
	env.waitForAgents(2)
}

func TestInvalidTemplateIsReported(t *testing.T) {
	env := newTestEnv(t)
	env.start()
	env.pool(func(p *v1alpha1.SandboxPool) { p.Spec.AgentTemplate.Spec.Containers[0].Name = "other" })
	env.eventually(func() bool { return poolCondition(env.getPool(), v1alpha1.ConditionReady).Reason == "InvalidTemplate" }, func() string { return "the condition is missing" })
	require.Contains(t, poolCondition(env.getPool(), v1alpha1.ConditionReady).Message, "named agent")
	require.Empty(t, env.pods())
	p := env.getPool()
	old := p.DeepCopy()
	p.Spec.AgentTemplate.Spec.Containers[0].Name = "agent"
	require.NoError(t, kube.Patch(env.ctx, p, client.MergeFrom(old)))
	env.waitForAgents(1)
}
