package pool

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// survey is all that one reconcile knows of a pool.
type survey struct {
	pool *v1alpha1.SandboxPool
	name types.NamespacedName
	want desired.Pool
	load desired.Load
	// agents are the Pods that count; byName finds their Pods. finished ones ran out and are to be replaced.
	agents   []desired.Agent
	byName   map[string]*corev1.Pod
	finished []*corev1.Pod
	// expected Pods are created and not in the cache yet; deleted ones were deleted by this reconcile.
	expected, deleted int
	ready, onReady    int
}

func (s *survey) current() int { return len(s.agents) + s.expected - s.deleted }

// survey reads Pods, Sandboxes and the Registry. Whatever one of them knows of a sandbox counts: a fast one is in the
// Registry before it is a resource, and a declared one the other way round.
func (r *Reconciler) survey(ctx context.Context, p *v1alpha1.SandboxPool) (*survey, error) {
	s := &survey{pool: p, name: client.ObjectKeyFromObject(p), want: wanted(p), byName: map[string]*corev1.Pod{}}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(p.Namespace), client.MatchingLabels(selector(p))); err != nil {
		return nil, fmt.Errorf("listing agent pods: %w", err)
	}
	var sandboxes v1alpha1.SandboxList
	if err := r.Client.List(ctx, &sandboxes, client.InNamespace(p.Namespace), client.MatchingFields{PoolField: p.Name}); err != nil {
		return nil, fmt.Errorf("listing sandboxes: %w", err)
	}
	used := r.usage(s, sandboxes.Items)
	hash := templateHash(p, r.Injection)
	seen := sets.New[types.UID]()
	for i := range pods.Items {
		pod := &pods.Items[i]
		if !ownedBy(pod, p) {
			continue
		}
		seen.Insert(pod.UID)
		switch {
		case pod.DeletionTimestamp != nil || r.expect.isDeleted(s.name, pod.UID):
			continue
		case pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
			s.finished = append(s.finished, pod)
			continue
		}
		n := used[string(pod.UID)]
		s.byName[pod.Name] = pod
		s.agents = append(s.agents, desired.Agent{
			Name: pod.Name, Busy: n > 0, Ready: isReady(pod), Created: pod.CreationTimestamp.Time,
			Outdated: pod.Labels[v1alpha1.LabelTemplateHash] != hash,
		})
		if isReady(pod) {
			s.ready++
			s.onReady += n
		}
	}
	s.expected = r.expect.observe(s.name, seen)
	return s, nil
}

// usage counts the places taken on each agent, by Pod uid, and fills the load.
func (r *Reconciler) usage(s *survey, sandboxes []v1alpha1.Sandbox) map[string]int {
	on := map[string]sets.Set[string]{} // Pod uid -> sandbox uids
	add := func(agent, sandbox string) {
		if on[agent] == nil {
			on[agent] = sets.New[string]()
		}
		on[agent].Insert(sandbox)
	}
	ports := map[int32]int{}
	for i := range sandboxes {
		sbx := &sandboxes[i]
		a, err := sbx.Assignment()
		waits := a == nil && err == nil && sbx.DeletionTimestamp == nil &&
			(sbx.Status.Phase == "" || sbx.Status.Phase == v1alpha1.PhasePending)
		switch {
		case err != nil: // somebody may run there: counted as active, on an agent that is not known
			add("unknown", sbx.EffectiveUID())
		case a != nil:
			add(a.AgentUID, sbx.EffectiveUID())
		case waits:
			s.load.Pending++
		}
		if (waits || a != nil) && sbx.Spec.Network != v1alpha1.NetworkModeNone {
			for _, port := range sbx.Spec.ExposedPorts {
				ports[port]++
			}
		}
	}
	used := map[string]int{}
	for _, a := range r.Index.Pool(s.name) {
		uid := a.GetInfo().GetPodUid()
		for _, report := range a.Sandboxes {
			add(uid, report.GetRecord().GetFence().GetSandboxUid())
		}
		used[uid] = int(a.GetAllocated()) // reservations included
	}
	for uid, sandboxes := range on {
		used[uid] = max(used[uid], sandboxes.Len())
	}
	for _, n := range used {
		s.load.Active += n
	}
	if s.load.Pending > 0 {
		for _, n := range ports {
			s.load.PortDemand = max(s.load.PortDemand, n)
		}
	}
	return used
}

func wanted(p *v1alpha1.SandboxPool) desired.Pool {
	c := p.Spec.Capacity
	return desired.Pool{
		PoolMin: int(c.PoolMin), PoolMax: int(c.PoolMax), BufferMin: int(c.BufferMin), BufferMax: int(c.BufferMax),
		PerAgent: perAgent(p),
	}
}

func perAgent(p *v1alpha1.SandboxPool) int { return max(int(p.Spec.MaxSandboxesPerPod), 1) }

func selector(p *v1alpha1.SandboxPool) map[string]string {
	return map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: p.Name}
}

func ownedBy(pod *corev1.Pod, p *v1alpha1.SandboxPool) bool {
	for _, o := range pod.OwnerReferences {
		if o.UID == p.UID {
			return true
		}
	}
	return false
}

func isReady(pod *corev1.Pod) bool {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}
