package mesh

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"google.golang.org/grpc"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// Tenant is the user of a namespace, who may do there what the role fast-sandbox-edit allows.
type Tenant struct {
	// Namespace is its namespace, Pool its pool, Token its token for Fast Sandbox, and KubeToken one for the API server.
	Namespace, Pool, Token, KubeToken string
	// Sandboxes, Allocator and Auth are clients with its token.
	Sandboxes sandboxv1.SandboxServiceClient
	Allocator allocatorv1.AllocatorServiceClient
	Auth      authv1.AuthServiceClient
	// Conn is the connection of the clients.
	Conn *grpc.ClientConn
	// Kube is the API server, as the tenant.
	Kube client.WithWatch
}

const (
	user     = "tenant"
	editRole = "fast-sandbox-edit"
	// poolRole is the ClusterRole that the controller needs in the namespaces of pools, where the deployment has one.
	poolRole = "fast-sandbox-pool-namespace"
)

// Tenant makes a namespace with a user.
func (m *Mesh) Tenant(ctx context.Context, namespace, pool string) (*Tenant, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: user}}
	objects := []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace, Annotations: map[string]string{v1alpha1.AnnotationDefaultPool: pool}}},
		account,
		binding(namespace, user, editRole, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: user}),
	}
	if err := m.Kube.Get(ctx, client.ObjectKey{Name: poolRole}, &rbacv1.ClusterRole{}); err == nil {
		objects = append(objects, binding(namespace, "controller", poolRole, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: System, Name: "controller"}))
	}
	for _, o := range objects {
		if err := m.Kube.Create(ctx, o); err != nil && !apierrors.IsAlreadyExists(err) {
			return nil, fmt.Errorf("making tenant %s: %w", namespace, err)
		}
	}
	t := &Tenant{Namespace: namespace, Pool: pool}
	var err error
	if t.Token, err = m.token(ctx, account, Audience); err != nil {
		return nil, err
	}
	if t.KubeToken, err = m.token(ctx, account, ""); err != nil {
		return nil, err
	}
	conn, err := m.Dial(t.Token)
	if err != nil {
		return nil, err
	}
	t.Conn = conn
	t.Sandboxes, t.Allocator, t.Auth = sandboxv1.NewSandboxServiceClient(conn), allocatorv1.NewAllocatorServiceClient(conn), authv1.NewAuthServiceClient(conn)
	cfg := rest.AnonymousClientConfig(m.KubeConfig)
	cfg.BearerToken = t.KubeToken
	t.Kube, err = m.kubeAs(cfg)
	return t, err
}

func binding(namespace, name, role string, subject rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{subject},
	}
}

// token returns a token of a ServiceAccount; without an audience it is one for the API server.
func (m *Mesh) token(ctx context.Context, account *corev1.ServiceAccount, audience string) (string, error) {
	seconds := int64(3600)
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds}}
	if audience != "" {
		request.Spec.Audiences = []string{audience}
	}
	if err := m.Kube.SubResource("token").Create(ctx, account, request); err != nil {
		return "", fmt.Errorf("making a token: %w", err)
	}
	return request.Status.Token, nil
}

// PoolOptions describe a pool.
type PoolOptions struct {
	// Image is that of its agents; empty for that of the default pool.
	Image string
	// Env is added to the environment of its agents.
	Env map[string]string
	// Agents is their number, Capacity that of each of them, and Slots how many are kept on each.
	Agents, Capacity, Slots int32
	// CPU is what each agent requests; empty for that of the default pool.
	CPU string
}

// MakePool makes a pool like the default one.
func (m *Mesh) MakePool(ctx context.Context, namespace, name string, o PoolOptions) error {
	var like v1alpha1.SandboxPool
	if err := m.Kube.Get(ctx, client.ObjectKey{Namespace: "default", Name: "default"}, &like); err != nil {
		return fmt.Errorf("reading the default pool: %w", err)
	}
	p := &v1alpha1.SandboxPool{Spec: like.Spec}
	p.Namespace, p.Name = namespace, name
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: o.Agents, PoolMax: o.Agents, BufferMax: o.Agents * o.Capacity}
	p.Spec.MaxSandboxesPerPod, p.Spec.Slots = o.Capacity, &v1alpha1.PoolSlots{Min: &o.Slots, Max: &o.Slots}
	for i := range p.Spec.AgentTemplate.Spec.Containers {
		c := &p.Spec.AgentTemplate.Spec.Containers[i]
		if c.Name != "agent" {
			continue
		}
		if o.Image != "" {
			c.Image, c.ImagePullPolicy = o.Image, corev1.PullNever
		}
		if o.CPU != "" {
			cpu, err := resource.ParseQuantity(o.CPU)
			if err != nil {
				return fmt.Errorf("making pool %s/%s: %w", namespace, name, err)
			}
			c.Resources.Requests[corev1.ResourceCPU] = cpu
		}
		for k, v := range o.Env {
			c.Env = append(c.Env, corev1.EnvVar{Name: k, Value: v})
		}
	}
	if err := m.Kube.Create(ctx, p); err != nil {
		return fmt.Errorf("making pool %s/%s: %w", namespace, name, err)
	}
	return nil
}

// Agents returns the agent Pods of a pool that run.
func (m *Mesh) Agents(ctx context.Context, namespace, pool string) ([]corev1.Pod, error) {
	var pods corev1.PodList
	if err := m.Kube.List(ctx, &pods, client.InNamespace(namespace), client.MatchingLabels{v1alpha1.LabelPool: pool}); err != nil {
		return nil, fmt.Errorf("listing agents: %w", err)
	}
	var out []corev1.Pod
	for _, p := range pods.Items {
		if p.DeletionTimestamp == nil && p.Status.PodIP != "" {
			out = append(out, p)
		}
	}
	return out, nil
}

// AwaitAgents waits until the agents of a pool accept sandboxes and have their slots.
func (m *Mesh) AwaitAgents(ctx context.Context, t *Tenant, pool string, agents, slots int32) error {
	return Poll(ctx, ReadyTime, func(ctx context.Context) error {
		list, err := t.Allocator.ListAgents(ctx, &allocatorv1.ListAgentsRequest{Namespace: t.Namespace, Pool: pool})
		if err != nil {
			return err
		}
		ready := int32(0)
		for _, a := range list.GetAgents() {
			if a.GetReady() && a.GetFreeSlots() >= slots {
				ready++
			}
		}
		if ready < agents {
			return fmt.Errorf("%d of %d agents of %s/%s are ready: %v", ready, agents, t.Namespace, pool, list.GetAgents())
		}
		return nil
	})
}

// Sweep deletes the namespaces and everything in them, whatever a run has left, and waits until nothing is left on the node.
func (m *Mesh) Sweep(ctx context.Context, namespaces ...string) error {
	err := Poll(ctx, 2*SettleTime, func(ctx context.Context) error {
		var errs []error
		for _, n := range namespaces {
			errs = append(errs, m.sweep(ctx, n))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return err
	}
	return Poll(ctx, 2*SettleTime, func(ctx context.Context) error { return m.nodeIsClean(ctx, namespaces) })
}

// sweep deletes, in the order in which the controller can follow: the sandboxes, the pools, and then the namespace.
func (m *Mesh) sweep(ctx context.Context, namespace string) error {
	if err := m.Kube.Get(ctx, client.ObjectKey{Name: namespace}, &corev1.Namespace{}); apierrors.IsNotFound(err) {
		return nil
	}
	var sandboxes v1alpha1.SandboxList
	if err := m.Kube.List(ctx, &sandboxes, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("listing sandboxes: %w", err)
	}
	for i := range sandboxes.Items {
		if err := m.Kube.Delete(ctx, &sandboxes.Items[i], client.GracePeriodSeconds(0)); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting a sandbox: %w", err)
		}
	}
	if n := len(sandboxes.Items); n > 0 {
		return fmt.Errorf("%d sandboxes of %s are left", n, namespace)
	}
	var pools v1alpha1.SandboxPoolList
	if err := m.Kube.List(ctx, &pools, client.InNamespace(namespace)); err != nil {
		return fmt.Errorf("listing pools: %w", err)
	}
	for i := range pools.Items {
		if err := m.Kube.Delete(ctx, &pools.Items[i]); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("deleting a pool: %w", err)
		}
	}
	if n := len(pools.Items); n > 0 {
		return fmt.Errorf("%d pools of %s are left", n, namespace)
	}
	if err := m.Kube.Delete(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting namespace %s: %w", namespace, err)
	}
	return fmt.Errorf("namespace %s is left", namespace)
}

// nodeIsClean returns an error while a container of the namespaces exists.
func (m *Mesh) nodeIsClean(ctx context.Context, namespaces []string) error {
	for _, n := range namespaces {
		left, err := m.Containers(ctx, n, "")
		if err != nil {
			return err
		}
		if len(left) > 0 {
			return fmt.Errorf("containers of %s are left: %s", n, strings.Join(left, ", "))
		}
	}
	return nil
}

// Containers returns the ids of the containers of a sandbox on the node; with an empty name, those of a namespace.
func (m *Mesh) Containers(ctx context.Context, namespace, name string) ([]string, error) {
	filter := fmt.Sprintf("labels.%q==%q", v1alpha1.LabelSandboxNamespace, namespace)
	if name != "" {
		filter += fmt.Sprintf(",labels.%q==%q", v1alpha1.LabelSandboxName, name)
	}
	list, err := m.Node.ContainerService().List(ctx, filter)
	if err != nil {
		return nil, fmt.Errorf("listing containers: %w", err)
	}
	ids := make([]string, 0, len(list))
	for _, c := range list {
		ids = append(ids, c.ID)
	}
	return ids, nil
}
