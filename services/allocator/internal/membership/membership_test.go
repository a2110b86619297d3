package membership_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/membership"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// feed records the Pods that are agents, and those that are held.
type feed struct {
	agents map[string]string // "namespace/pool node address", by uid
	held   map[string]bool
}

func (f *feed) SetPod(info *agentv1.AgentInfo, address string) {
	delete(f.held, info.GetPodUid())
	f.agents[info.GetPodUid()] = info.GetNamespace() + "/" + info.GetPool() + " " + info.GetNodeName() + " " + address
}
func (f *feed) HoldPod(uid string)   { f.held[uid] = true }
func (f *feed) RemovePod(uid string) { delete(f.agents, uid); delete(f.held, uid) }

type fixture struct {
	*membership.Members

	feed    *feed
	refused []string
}

func newFixture() *fixture {
	f := &fixture{feed: &feed{agents: map[string]string{}, held: map[string]bool{}}}
	f.Members = membership.New(membership.Config{
		Feed: f.feed, Address: func(ip string) string { return ip + ":5758" },
		Refused: func(agent *agentv1.AgentInfo, kind string, n int) {
			f.refused = append(f.refused, kind+" "+agent.GetPodName())
		},
	})
	return f
}

func pool(namespace, name, uid string) *v1alpha1.SandboxPool {
	return &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(uid)}}
}

// pod returns a running Pod of the pool ns/p with the uid p1, and change changes it.
func pod(change func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: "pod-a", UID: "a", Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: "p"},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pool("ns", "p", "p1"), v1alpha1.GroupVersion.WithKind("SandboxPool"))},
		},
		Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"},
	}
	if change != nil {
		change(p)
	}
	return p
}

// TestOnlyPodsOfAPoolAreAgents: labels alone make no Pod an agent, and the label of another pool none of that pool.
func TestOnlyPodsOfAPoolAreAgents(t *testing.T) {
	tests := map[string]struct {
		forge   func(*corev1.Pod)
		agent   string
		refused bool
	}{
		"its pool owns it":            {nil, "ns/p n 10.0.0.1:5758", false},
		"the label of another pool":   {func(p *corev1.Pod) { p.Labels[v1alpha1.LabelPool] = "victim" }, "ns/p n 10.0.0.1:5758", false},
		"no owner":                    {func(p *corev1.Pod) { p.OwnerReferences = nil }, "", true},
		"owned, but not controlled":   {func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }, "", true},
		"an earlier pool of the name": {func(p *corev1.Pod) { p.OwnerReferences[0].UID = "p0" }, "", true},
		"no uid":                      {func(p *corev1.Pod) { p.OwnerReferences[0].UID = "" }, "", true},
		"an unknown pool":             {func(p *corev1.Pod) { p.OwnerReferences[0].Name = "q" }, "", false},
		"a pool of another namespace": {func(p *corev1.Pod) { p.Namespace = "other" }, "", false},
		"another kind":                {func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "ReplicaSet" }, "", true},
		"another group":               {func(p *corev1.Pod) { p.OwnerReferences[0].APIVersion = "example.com/v1" }, "", true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f := newFixture()
			f.SetPool(pool("ns", "p", "p1"))
			f.SetPool(pool("ns", "victim", "v1"))
			p := pod(test.forge)
			f.SetPod(p)
			f.SetPod(p)
			require.Equal(t, test.agent, f.feed.agents["a"])
			require.Equal(t, test.agent == "", f.feed.held["a"], "a Pod that exists is not gone")
			if test.refused {
				require.Equal(t, []string{"pod pod-a"}, f.refused, "once")
			} else {
				require.Empty(t, f.refused)
			}
			f.RemovePod(p)
			require.Empty(t, f.feed.agents)
			require.Empty(t, f.feed.held)
		})
	}
}

func TestPodIsSeenBeforeItsPool(t *testing.T) {
	f := newFixture()
	f.SetPod(pod(nil))
	require.Empty(t, f.feed.agents)
	f.SetPool(pool("other", "p", "p1"))
	f.SetPool(pool("ns", "p", "p0"))
	require.Empty(t, f.feed.agents)
	f.RemovePool(pool("ns", "p", "p0"))
	f.SetPool(pool("ns", "p", "p1"))
	f.SetPool(pool("ns", "p", "p1"))
	require.Len(t, f.feed.agents, 1)
}

// TestAgentOutlivesItsPool: its sandboxes still run, and another pool of the name does not get it.
func TestAgentOutlivesItsPool(t *testing.T) {
	f := newFixture()
	f.SetPool(pool("ns", "p", "p1"))
	f.SetPod(pod(func(p *corev1.Pod) { p.Status.PodIP = "" }))
	require.Empty(t, f.feed.agents)
	require.True(t, f.feed.held["a"])
	f.SetPod(pod(nil))
	f.RemovePool(pool("ns", "p", "p0"))
	f.RemovePool(pool("ns", "p", "p1"))
	f.SetPod(pod(func(p *corev1.Pod) { p.Status.PodIP = "10.0.0.2"; p.OwnerReferences = nil }))
	require.Equal(t, "ns/p n 10.0.0.2:5758", f.feed.agents["a"])
	f.SetPod(pod(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }))
	require.Empty(t, f.feed.agents)
	f.SetPod(pod(nil))
	require.Empty(t, f.feed.agents, "its pool is gone")
}
