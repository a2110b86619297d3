package pool

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// survey is all that one reconcile knows of a pool.
type survey struct {
	pool *v1alpha1.SandboxPool
	name types.NamespacedName
	want desired.Pool
	load desired.Load
	// members are the agents that count, by the names of their Pods; finished Pods ran out and are to be replaced.
	members  map[string]*member
	finished []*corev1.Pod
	// expected Pods are created and not in the cache yet.
	expected int
	// dissolved tells that the pool is let go: it has no status any more.
	dissolved bool
}

// member is an agent whose Pod has neither ended nor is on its way out.
type member struct {
	pod *corev1.Pod
	// drain is why it drains; empty if it serves.
	drain string
	// outdated tells that the pool's template is another one by now.
	outdated bool
	// agent is what the Registry knows of it; known is false if that is nothing.
	agent agents.Agent
	known bool
	// held is the number of sandboxes that are assigned to it or that it reports; ended of those are of sandboxes whose
	// process has ended. used is the number of places that are taken on it, as far as anybody knows: held, or what is
	// reserved if that is more, and counts (see vacate).
	held, used, ended int
}

// current is the number of agent Pods.
func (s *survey) current() int { return len(s.members) + s.expected }

// agents are the members as the pure core wants them, those that are expected included.
func (s *survey) agents(d *drains) []desired.Agent {
	var out []desired.Agent
	for _, m := range s.members {
		out = append(out, desired.Agent{
			Name: m.pod.Name, Busy: m.used > 0, Ready: isReady(m.pod), Outdated: m.outdated, Created: m.pod.CreationTimestamp.Time,
			Draining: m.drain != "", Fixed: m.drain != "" && (!ours(m.drain) || d.silent(m.pod.UID)),
		})
	}
	for i := range s.expected {
		out = append(out, desired.Agent{Name: fmt.Sprint("/", i)}) // no Pod's name
	}
	return out
}

// ours tells that an agent drains by this controller's will, which may change.
func ours(reason string) bool {
	return reason == v1alpha1.DrainScaleDown || reason == v1alpha1.DrainOutdated || reason == v1alpha1.DrainPoolDeleted
}

// survey reads Pods, Sandboxes and the Registry. Whatever one of them knows of a sandbox counts: a fast one is in the
// Registry before it is a resource, and a declared one the other way round.
func (r *Reconciler) survey(ctx context.Context, p *v1alpha1.SandboxPool) (*survey, error) {
	s := &survey{pool: p, name: client.ObjectKeyFromObject(p), want: wanted(p), members: map[string]*member{}}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(p.Namespace), client.MatchingLabels(selector(p))); err != nil {
		return nil, fmt.Errorf("listing agent pods: %w", err)
	}
	var sandboxes v1alpha1.SandboxList
	if err := r.Client.List(ctx, &sandboxes, client.InNamespace(p.Namespace), client.MatchingFields{PoolField: p.Name}); err != nil {
		return nil, fmt.Errorf("listing sandboxes: %w", err)
	}
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
		case pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
			s.finished = append(s.finished, pod)
		default:
			m := &member{pod: pod, outdated: pod.Labels[v1alpha1.LabelTemplateHash] != hash}
			m.drain = r.expect.draining(s.name, pod.UID, pod.Annotations[v1alpha1.AnnotationDraining])
			m.agent, m.known = r.Index.Agent(string(pod.UID))
			s.members[pod.Name] = m
		}
	}
	s.expected = r.expect.observe(s.name, seen)
	r.drains.keep(s.name, seen)
	r.usage(s, sandboxes.Items, r.Index.Pool(s.name))
	return s, nil
}

// usage counts the places that are taken on each agent and fills the load.
func (r *Reconciler) usage(s *survey, resources []v1alpha1.Sandbox, registry []agents.Agent) {
	u := newUsage(s)
	waiting := map[string]int64{} // sandbox uid -> last attempt
	for i := range resources {
		sbx := &resources[i]
		a, err := sbx.Assignment()
		waits := a == nil && err == nil && sbx.DeletionTimestamp == nil &&
			(sbx.Status.Phase == "" || sbx.Status.Phase == v1alpha1.PhasePending)
		at := ""
		switch {
		case err != nil: // somebody may run there: counted as active, on an agent that is not known
			u.add("unknown", sbx.EffectiveUID())
		case a != nil:
			at = a.AgentUID
			u.add(at, sbx.EffectiveUID())
		case waits:
			waiting[sbx.EffectiveUID()] = sbx.Status.Attempt
		}
		if (waits || a != nil) && !u.drains.Has(at) && sbx.Spec.Network != v1alpha1.NetworkModeNone {
			for _, port := range sbx.Spec.ExposedPorts {
				u.ports[port]++
			}
		}
	}
	reserved := map[string]int{}
	for _, a := range registry {
		uid := a.GetInfo().GetPodUid()
		for _, report := range a.Sandboxes {
			fence := report.GetRecord().GetFence()
			u.add(uid, fence.GetSandboxUid())
			// A later attempt than its resource tells of: that is late. An earlier one waits for another place all the same.
			if last, waits := waiting[fence.GetSandboxUid()]; waits && fence.GetAttempt() > last && !u.drains.Has(uid) {
				delete(waiting, fence.GetSandboxUid())
			}
		}
		reserved[uid] = int(a.GetAllocated())
	}
	used := map[string]int{}
	for uid, sandboxes := range u.on {
		used[uid] = sandboxes.Len()
	}
	for uid, n := range reserved {
		used[uid] = max(used[uid], n)
	}
	for _, m := range s.members {
		m.held, m.used, m.ended = u.on[string(m.pod.UID)].Len(), used[string(m.pod.UID)], ended(m.agent)
		r.vacate(m)
	}
	held := 0
	for uid, n := range used {
		if !u.drains.Has(uid) {
			s.load.Active += n
			held += u.on[uid].Len()
		}
	}
	// What waits by its resource can have a reservation already: one that no known sandbox accounts for. Counted twice it
	// would have an agent made for nothing.
	s.load.Pending = max(0, len(waiting)-(s.load.Active-held))
	if s.load.Pending > 0 {
		for _, n := range u.ports {
			s.load.PortDemand = max(s.load.PortDemand, n)
		}
	}
}

// usage is a count that goes on.
type usage struct {
	on     map[string]sets.Set[string] // Pod uid -> sandbox uids
	ports  map[int32]int
	drains sets.Set[string] // Pod uids
}

func newUsage(s *survey) *usage {
	u := &usage{on: map[string]sets.Set[string]{}, ports: map[int32]int{}, drains: sets.New[string]()}
	for _, m := range s.members {
		if m.drain != "" {
			u.drains.Insert(string(m.pod.UID))
		}
	}
	return u
}

func (u *usage) add(agent, sandbox string) {
	if u.on[agent] == nil {
		u.on[agent] = sets.New[string]()
	}
	u.on[agent].Insert(sandbox)
}

func ended(a agents.Agent) int {
	n := 0
	for _, report := range a.Sandboxes {
		if report.GetState() == agentv1.SandboxState_SANDBOX_STATE_STOPPED {
			n++
		}
	}
	return n
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

// counted is a number with its noun.
func counted(n int, noun, plural string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %s", n, plural)
}
