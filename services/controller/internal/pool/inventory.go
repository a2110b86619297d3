package pool

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// inventory is what one reconcile knows of a pool.
type inventory struct {
	pool *v1alpha1.SandboxPool
	name types.NamespacedName
	want desired.Pool
	load desired.Load
	// members are the agents that count, by the names of their Pods. finished are Pods that have terminated by themselves and
	// are replaced.
	members  map[string]*member
	finished []*corev1.Pod
	// expected is the number of Pods that were created and are not in the cache yet.
	expected int
}

// member is an agent whose Pod has neither terminated nor been deleted.
type member struct {
	pod *corev1.Pod
	// drain is why the agent is drained; empty if it serves.
	drain string
	// outdated: the Pod was created from another template than the pool's current one.
	outdated bool
	// agent is the agent in the Registry; known is false if the Registry does not have it.
	agent agents.Agent
	known bool
	// usage is what the agent is used for.
	usage desired.Usage
}

// ready reports whether the agent can run new sandboxes: its Pod is ready, and the agent does not say that its container runtime cannot.
func (m *member) ready() bool { return isReady(m.pod) && m.runtimeProblem() == "" }

// runtimeProblem returns why the agent's container runtime cannot run new sandboxes, as the agent says; empty if it does not say so.
func (m *member) runtimeProblem() string {
	if !m.known {
		return ""
	}
	problem, unavailable := strings.CutPrefix(m.agent.GetReason(), string(fault.RuntimeUnavailable)+": ")
	if !unavailable {
		return ""
	}
	return problem
}

// current returns the number of agent Pods.
func (i *inventory) current() int { return len(i.members) + i.expected }

// sorted returns the members in the order of their names.
func (i *inventory) sorted() []*member {
	out := make([]*member, 0, len(i.members))
	for _, m := range i.members {
		out = append(out, m)
	}
	slices.SortFunc(out, func(a, b *member) int { return compareNames(a.pod, b.pod) })
	return out
}

// agents returns the members as package desired needs them, with those that are expected.
func (i *inventory) agents(d *drains) []desired.Agent {
	var out []desired.Agent
	for _, m := range i.members {
		out = append(out, desired.Agent{
			Name: m.pod.Name, Busy: m.usage.Busy(), Ready: m.ready(), Outdated: m.outdated, Created: m.pod.CreationTimestamp.Time,
			Draining: m.drain != "", Fixed: m.drain != "" && (!drainedByController(m.drain) || d.silent(m.pod.UID)),
		})
	}
	for n := range i.expected {
		out = append(out, desired.Agent{Name: fmt.Sprint("/", n)}) // not a valid name of a Pod
	}
	return out
}

// drainedByController reports whether this controller has decided to drain the agent, so that it may change its decision.
func drainedByController(reason string) bool {
	return reason == v1alpha1.DrainScaleDown || reason == v1alpha1.DrainOutdated || reason == v1alpha1.DrainPoolDeleted
}

// inventory reads Pods, Sandboxes and the Registry.
func (r *Reconciler) inventory(ctx context.Context, p *v1alpha1.SandboxPool) (*inventory, error) {
	i := &inventory{pool: p, name: client.ObjectKeyFromObject(p), want: wanted(p), members: map[string]*member{}}
	var pods corev1.PodList
	if err := r.Client.List(ctx, &pods, client.InNamespace(p.Namespace), client.MatchingLabels(selector(p))); err != nil {
		return nil, fmt.Errorf("listing agent pods: %w", err)
	}
	var sandboxes v1alpha1.SandboxList
	if err := r.Client.List(ctx, &sandboxes, client.InNamespace(p.Namespace), client.MatchingFields{fields.Pool: p.Name}); err != nil {
		return nil, fmt.Errorf("listing sandboxes: %w", err)
	}
	hash := templateHash(p, r.Injection)
	seen := sets.New[types.UID]()
	for n := range pods.Items {
		pod := &pods.Items[n]
		if !ownedBy(pod, p) {
			continue
		}
		seen.Insert(pod.UID)
		switch {
		case pod.DeletionTimestamp != nil || r.expect.isDeleted(i.name, pod.UID):
		case pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded:
			i.finished = append(i.finished, pod)
		default:
			m := &member{pod: pod, outdated: pod.Labels[v1alpha1.LabelTemplateHash] != hash}
			m.drain = r.expect.draining(i.name, pod.UID, pod.Annotations[v1alpha1.AnnotationDraining])
			m.agent, m.known = r.Index.Agent(string(pod.UID))
			i.members[pod.Name] = m
		}
	}
	i.expected = r.expect.observe(i.name, seen)
	r.drains.keep(i.name, seen)
	r.pins.keep(i.name, seen)
	i.measure(sandboxes.Items, r.Index.Pool(i.name), r.drains)
	return i, nil
}

// unknownAgent stands for the agent of a Sandbox whose assignment cannot be decoded. The Sandbox may be running.
const unknownAgent = "unknown"

// measure fills in the load, and the usage of each member.
func (i *inventory) measure(sandboxes []v1alpha1.Sandbox, registry []agents.Agent, d *drains) {
	resources := make([]desired.Resource, len(sandboxes))
	for n := range sandboxes {
		resources[n] = resourceOf(&sandboxes[n])
	}
	var reports []desired.Report
	reserved := map[string]int{}
	for _, a := range registry {
		uid := a.GetInfo().GetPodUid()
		for _, report := range a.Sandboxes {
			fence := report.GetRecord().GetFence()
			reports = append(reports, desired.Report{Agent: uid, UID: fence.GetSandboxUid(), Attempt: fence.GetAttempt(), Finished: processEnded(report)})
		}
		reserved[uid] = int(a.GetAllocated())
	}
	draining := sets.New[string]()
	for _, m := range i.members {
		if m.drain != "" {
			draining.Insert(string(m.pod.UID))
		}
	}
	load, usage := desired.Measure(resources, reports, reserved, func(agent string) bool { return draining.Has(agent) })
	i.load = load
	for _, m := range i.members {
		m.usage = usage[string(m.pod.UID)]
		d.dropReservations(m)
	}
}

// resourceOf returns a Sandbox as package desired needs it.
func resourceOf(s *v1alpha1.Sandbox) desired.Resource {
	out := desired.Resource{UID: s.EffectiveUID(), Attempt: s.Status.Attempt, Deleting: s.DeletionTimestamp != nil,
		Finished: s.Status.FinishTime != nil || s.Status.Phase == v1alpha1.PhaseFailed}
	switch a, err := s.Assignment(); {
	case err != nil:
		out.Agent = unknownAgent
	case a != nil:
		out.Agent = a.AgentUID
	default:
		out.Waiting = !out.Deleting && (s.Status.Phase == "" || s.Status.Phase == v1alpha1.PhasePending)
	}
	if s.Spec.Network != v1alpha1.NetworkModeNone {
		out.Ports = s.Spec.ExposedPorts
	}
	return out
}

// processEnded reports whether a report says that the process has ended, or never started.
func processEnded(r *agentv1.SandboxReport) bool {
	s := r.GetState()
	return s == agentv1.SandboxState_SANDBOX_STATE_STOPPED || s == agentv1.SandboxState_SANDBOX_STATE_FAILED
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

func compareNames(a, b *corev1.Pod) int {
	switch {
	case a.Name < b.Name:
		return -1
	case a.Name > b.Name:
		return 1
	}
	return 0
}

// counted returns a number with its noun.
func counted(n int, noun, plural string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %s", n, plural)
}
