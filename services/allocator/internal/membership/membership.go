// Package membership decides which Pods are agents, and of which pool: those whose controller is a SandboxPool that exists, by name
// and uid, in their own namespace. Labels prove nothing, because users can write them. It keeps the Pods that no pool owns (yet), and
// does no I/O. All methods may be called concurrently; they are called in the order of the informers' events.
//
// A Pod that was an agent once stays one until it is removed, also if its pool is gone by then: its sandboxes still run.
//
// Lock order: the lock of this package, then those of the feed and what it calls.
package membership

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/refusal"
)

// Feed connects to agents. *feed.Feed implements it.
type Feed interface {
	// SetPod adds the agent of a Pod; HoldPod notes a Pod that exists and is not known to be an agent; RemovePod removes either.
	SetPod(info *agentv1.AgentInfo, address string)
	HoldPod(uid string)
	RemovePod(uid string)
}

// Config is what a Members needs.
type Config struct {
	Feed Feed
	// Address returns the address of the agent at an IP.
	Address func(ip string) string
	// Refused records a Pod that has the labels of an agent and is none.
	Refused func(agent *agentv1.AgentInfo, kind string, n int)
}

// Members knows the Pods with the labels of an agent.
type Members struct {
	config Config

	mu      sync.Mutex
	pools   map[types.NamespacedName]types.UID
	joined  map[types.UID]string      // the pools of agents, by the uid of the Pod
	held    map[types.UID]*corev1.Pod // Pods that are not known to be agents
	refused map[types.UID]bool        // those of them that were recorded
}

// New returns a Members that knows no Pods.
func New(cfg Config) *Members {
	return &Members{
		config: cfg, pools: map[types.NamespacedName]types.UID{}, joined: map[types.UID]string{},
		held: map[types.UID]*corev1.Pod{}, refused: map[types.UID]bool{},
	}
}

// SetPool takes a pool from the informer. Its Pods may have been seen before.
func (m *Members) SetPool(p *v1alpha1.SandboxPool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
	if m.pools[key] == p.UID {
		return
	}
	m.pools[key] = p.UID
	for _, pod := range m.held {
		if pod.Namespace == p.Namespace {
			m.judge(pod)
		}
	}
}

// RemovePool takes the removal of a pool from the informer.
func (m *Members) RemovePool(p *v1alpha1.SandboxPool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if key := (types.NamespacedName{Namespace: p.Namespace, Name: p.Name}); m.pools[key] == p.UID {
		delete(m.pools, key)
	}
}

// SetPod takes a Pod with the labels of an agent from the informer. One that has ended counts as removed; one that is being deleted
// still serves its sandboxes.
func (m *Members) SetPod(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		m.remove(pod.UID)
		return
	}
	m.judge(pod)
}

// RemovePod takes the removal of a Pod from the informer.
func (m *Members) RemovePod(pod *corev1.Pod) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.remove(pod.UID)
}

func (m *Members) remove(uid types.UID) {
	delete(m.joined, uid)
	delete(m.held, uid)
	delete(m.refused, uid)
	m.config.Feed.RemovePod(string(uid))
}

// judge adds a Pod as an agent if a pool owns it, and otherwise keeps it until one does. mu is held.
func (m *Members) judge(pod *corev1.Pod) {
	pool, ok := m.joined[pod.UID]
	if !ok {
		if pool, ok = m.poolOf(pod); !ok {
			return
		}
		m.joined[pod.UID] = pool
		delete(m.held, pod.UID)
	}
	if pod.Status.PodIP == "" {
		m.config.Feed.HoldPod(string(pod.UID))
		return
	}
	m.config.Feed.SetPod(describe(pod, pool), m.config.Address(pod.Status.PodIP))
}

// poolOf returns the pool that owns a Pod; false if none does, and then it keeps the Pod. mu is held.
func (m *Members) poolOf(pod *corev1.Pod) (string, bool) {
	owner := metav1.GetControllerOf(pod)
	var uid types.UID
	if owner != nil && isPool(owner) {
		uid = m.pools[types.NamespacedName{Namespace: pod.Namespace, Name: owner.Name}]
		if uid == owner.UID && uid != "" {
			return owner.Name, true
		}
	}
	m.held[pod.UID] = pod
	m.config.Feed.HoldPod(string(pod.UID))
	waiting := owner != nil && isPool(owner) && uid == "" // the informer of pools may be behind
	if !waiting && !m.refused[pod.UID] {
		m.refused[pod.UID] = true
		m.config.Refused(describe(pod, ""), refusal.KindPod, 1)
	}
	return "", false
}

func isPool(owner *metav1.OwnerReference) bool {
	version, err := schema.ParseGroupVersion(owner.APIVersion)
	return err == nil && version.Group == v1alpha1.Group && owner.Kind == "SandboxPool"
}

func describe(pod *corev1.Pod, pool string) *agentv1.AgentInfo {
	return &agentv1.AgentInfo{
		PodName: pod.Name, PodUid: string(pod.UID), Namespace: pod.Namespace, Pool: pool, NodeName: pod.Spec.NodeName, PodIp: pod.Status.PodIP,
	}
}
