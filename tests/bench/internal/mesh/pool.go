package mesh

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

const (
	readyTime = 2 * time.Minute
	goneTime  = 2 * time.Minute
	poolTick  = 250 * time.Millisecond
	slotTick  = 50 * time.Millisecond
)

// Pool says what pool is wanted: one agent, so that all figures are one agent's.
type Pool struct {
	Name string
	// Places is how many sandboxes its agent takes.
	Places int
	// Slots bounds the slots; nil leaves the default, one for each free capacity unit.
	Slots *int
	// HostUsers is for sandboxes without user namespaces; otherwise they are as in the model's pool.
	HostUsers bool
}

// Slots is how a pool is off for slots.
type Slots struct {
	// Free are started and unclaimed, Wanted is what the agent means to keep.
	Free, Wanted int
	// Off is why there are none although some are wanted.
	Off string
}

// Open creates a pool, after it has removed one of that name from an earlier run, and waits until its agent is ready
// and has the slots that it wants.
func (m *Mesh) Open(ctx context.Context, want Pool) (Slots, error) {
	if err := m.Remove(ctx, want.Name); err != nil {
		return Slots{}, err
	}
	if err := m.openNamespace(ctx); err != nil {
		return Slots{}, err
	}
	like, err := m.model(ctx)
	if err != nil {
		return Slots{}, err
	}
	p := &v1alpha1.SandboxPool{Spec: like.Spec}
	p.Namespace, p.Name = Namespace, want.Name
	p.Spec.RuntimeHandler = m.Handler
	p.Spec.MaxSandboxesPerPod = int32(want.Places)
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 1}
	p.Spec.Slots = nil
	if want.Slots != nil {
		p.Spec.Slots = &v1alpha1.PoolSlots{Min: ptr.To(int32(*want.Slots)), Max: ptr.To(int32(*want.Slots))}
	}
	if want.HostUsers {
		p.Spec.UserNamespace = v1alpha1.UserNamespaceDisabled
	}
	if err := m.Kube.Create(ctx, p); err != nil {
		return Slots{}, fmt.Errorf("making pool %s: %w", want.Name, err)
	}
	return m.AwaitSlots(ctx, want.Name)
}

// model is the pool whose agents are like those of the benchmark's pools.
func (m *Mesh) model(ctx context.Context) (*v1alpha1.SandboxPool, error) {
	var like v1alpha1.SandboxPool
	if err := m.Kube.Get(ctx, client.ObjectKey{Namespace: "default", Name: "default"}, &like); err != nil {
		return nil, fmt.Errorf("reading the default pool, whose agents are taken for a model: %w", err)
	}
	return &like, nil
}

// openNamespace makes the namespace, which stays when the pools go, and permits the controller to run agents in it.
func (m *Mesh) openNamespace(ctx context.Context) error {
	objects := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}},
		&rbacv1.RoleBinding{
			ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: "controller"},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fast-sandbox-pool-namespace"},
			Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: system, Name: "controller"}},
		},
	}
	for _, o := range objects {
		if err := m.Kube.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making the namespace: %w", err)
		}
	}
	return nil
}

// AwaitSlots waits until the pool's agent is ready and has as many free slots as it means to have.
func (m *Mesh) AwaitSlots(ctx context.Context, pool string) (Slots, error) {
	var slots Slots
	err := Poll(ctx, slotTick, readyTime, func(ctx context.Context) error {
		a, err := m.agent(ctx, pool)
		if err != nil {
			return err
		}
		if slots = slotsOf(a); slots.Free < slots.Wanted {
			return fmt.Errorf("pool %s has %d of %d slots", pool, slots.Free, slots.Wanted)
		}
		return nil
	})
	return slots, err
}

// Slots is how a pool is off for slots now.
func (m *Mesh) Slots(ctx context.Context, pool string) (Slots, error) {
	a, err := m.agent(ctx, pool)
	if err != nil {
		return Slots{}, err
	}
	return slotsOf(a), nil
}

func slotsOf(a *allocatorv1.Agent) Slots {
	return Slots{Free: int(a.GetFreeSlots()), Wanted: int(a.GetWantedSlots()), Off: a.GetSlotsOffReason()}
}

// AgentUID is the uid of the Pod of a pool's agent.
func (m *Mesh) AgentUID(ctx context.Context, pool string) (string, error) {
	a, err := m.agent(ctx, pool)
	return a.GetInfo().GetPodUid(), err
}

// agent is the Registry's view of the pool's one agent, which must be ready.
func (m *Mesh) agent(ctx context.Context, pool string) (*allocatorv1.Agent, error) {
	list, err := m.Agents.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: Namespace, Pool: pool})
	if err != nil {
		return nil, fmt.Errorf("listing the agents of pool %s: %w", pool, err)
	}
	for _, a := range list.GetAgents() {
		if a.GetReady() {
			return a, nil
		}
	}
	return nil, fmt.Errorf("pool %s has no agent that is ready, of %d", pool, len(list.GetAgents()))
}

// left is the number of custom resources of a pool's sandboxes. With remove it deletes them.
func (m *Mesh) left(ctx context.Context, pool string, remove bool) (int, error) {
	var list v1alpha1.SandboxList
	if err := m.Kube.List(ctx, &list, client.InNamespace(Namespace)); err != nil {
		return 0, fmt.Errorf("listing sandboxes: %w", err)
	}
	n := 0
	for i := range list.Items {
		s := &list.Items[i]
		if s.Spec.PoolRef != pool {
			continue
		}
		n++
		if !remove || s.DeletionTimestamp != nil {
			continue
		}
		if err := m.Kube.Delete(ctx, s); client.IgnoreNotFound(err) != nil {
			return n, fmt.Errorf("deleting sandbox %s: %w", s.Name, err)
		}
	}
	return n, nil
}

// Empty returns an error unless nothing is left of any sandbox of a pool, neither at the API server nor on the node. With remove it
// deletes those whose deletion was not requested, for instance because their create was given up.
func (m *Mesh) Empty(ctx context.Context, pool string, remove bool) error {
	n, err := m.left(ctx, pool, remove)
	if err != nil {
		return err
	}
	containers, err := m.Node.ContainerService().List(ctx, fmt.Sprintf("labels.%q==%q,labels.%q==%q",
		v1alpha1.LabelPool, pool, v1alpha1.LabelState, v1alpha1.StateClaimed))
	if err != nil {
		return fmt.Errorf("listing containers: %w", err)
	}
	if n+len(containers) > 0 {
		return fmt.Errorf("pool %s has %d sandboxes and %d of their containers left", pool, n, len(containers))
	}
	return nil
}

// Remove deletes a pool with all sandboxes in it, and waits until its agents no longer exist.
func (m *Mesh) Remove(ctx context.Context, pool string) error {
	return Poll(ctx, poolTick, goneTime, func(ctx context.Context) error {
		if _, err := m.left(ctx, pool, true); err != nil {
			return err
		}
		p := &v1alpha1.SandboxPool{}
		p.Namespace, p.Name = Namespace, pool
		if err := m.Kube.Delete(ctx, p); !apierrors.IsNotFound(err) {
			return errors.Join(fmt.Errorf("pool %s is left", pool), err)
		}
		var pods corev1.PodList
		if err := m.Kube.List(ctx, &pods, client.InNamespace(Namespace), client.MatchingLabels{v1alpha1.LabelPool: pool}); err != nil {
			return fmt.Errorf("listing agents: %w", err)
		}
		if len(pods.Items) > 0 {
			return fmt.Errorf("%d agents of pool %s are left", len(pods.Items), pool)
		}
		return nil
	})
}
