//go:build integration

// Package rights runs each component as a process under its own account, with exactly the rights of the manifests, through what it does in
// a cluster, and compares the API server's audit log with these rights: no request is refused, and no right is unused. It needs the
// built binaries and root.
package rights_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// granted are the manifests of a cluster with an observing garbage collector.
var granted = []string{"base", "janitor", "apikeys", "overlays/cluster/pool.yaml"}

func TestEachComponentUsesItsRights(t *testing.T) {
	c := newCluster(t)
	objects := manifests(t, granted...)
	c.grant(objects)
	defer c.checkRefused(t) // above all if a step does not end because of that
	m := &mesh{cluster: c, token: c.user("caller")}

	m.startAllocator()
	m.resolveServices()
	m.startController()
	m.createPool(objects)
	first := m.startAgent()
	m.createKey()
	m.useSandboxes(first)
	m.replaceCertificate(first)
	m.loseAgent(first)
	m.observe()
	m.useGateway()
	m.deletePool()
	m.sweepNode()
	m.collect()
	m.revokeKey()
	m.stop()
	c.checkUnused(t)
}

// TestNamespacesAdmitTheirPods: the API server's Pod security admits each component where the manifests put it, and no privileged Pod
// beside the allocator.
func TestNamespacesAdmitTheirPods(t *testing.T) {
	c := newCluster(t)
	objects := manifests(t, granted...)
	c.grant(objects)
	create := func(namespace, name string, template corev1.PodTemplateSpec) error {
		pod := &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
		pod.Namespace, pod.Name, pod.Spec.PriorityClassName = namespace, name, "" // the controller manager creates the priority classes
		return c.admin.Create(t.Context(), pod, client.DryRunAll)
	}
	templates := map[string]corev1.PodTemplateSpec{}
	for _, o := range objects {
		switch o.GetKind() {
		case "Deployment":
			var d appsv1.Deployment
			require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &d))
			templates[d.Name] = d.Spec.Template
		case "DaemonSet":
			var d appsv1.DaemonSet
			require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &d))
			templates[d.Name] = d.Spec.Template
		default:
			continue
		}
		require.NoError(t, create(o.GetNamespace(), o.GetName(), templates[o.GetName()]))
	}
	require.Len(t, templates, 5)
	require.ErrorContains(t, create(system, "janitor", templates["janitor"]), "violates PodSecurity")
}

// TestStolenAccounts: the account of a component can do none of what an attacker would do with it first.
func TestStolenAccounts(t *testing.T) {
	c := newCluster(t)
	c.grant(manifests(t, granted...))
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: system, Name: "agent-ca"}}
	require.NoError(t, c.admin.Create(t.Context(), secret))
	escalations := map[string]func(context.Context, client.Client) error{
		"reads all Secrets": func(ctx context.Context, k client.Client) error { return k.List(ctx, &corev1.SecretList{}) },
		"reads a Secret of the mesh": func(ctx context.Context, k client.Client) error {
			return k.Get(ctx, client.ObjectKeyFromObject(secret), secret)
		},
		"creates a Pod beside the mesh": func(ctx context.Context, k client.Client) error {
			return k.Create(ctx, podIn(system), client.DryRunAll)
		},
		"creates a Pod in kube-system": func(ctx context.Context, k client.Client) error {
			return k.Create(ctx, podIn(metav1.NamespaceSystem), client.DryRunAll)
		},
		"binds itself elsewhere": func(ctx context.Context, k client.Client) error {
			return k.Create(ctx, bindingIn(metav1.NamespaceSystem), client.DryRunAll)
		},
	}
	for _, a := range []account{{system, "allocator"}, {system, "controller"}, {system, "gateway"}, {system, "gc"}, {janitors, "janitor"}} {
		cfg := *c.rest
		cfg.BearerToken, cfg.CertData, cfg.KeyData = c.token(a.namespace, a.name), nil, nil
		k, err := client.New(&cfg, client.Options{Scheme: c.admin.Scheme()})
		require.NoError(t, err)
		for what, attempt := range escalations {
			err := attempt(t.Context(), k)
			require.ErrorContains(t, err, "is forbidden: User \"system:serviceaccount:"+a.namespace+":"+a.name, "%s %s", a.name, what)
		}
	}
}

// serverOf returns a client configuration for a component, with a bearer token.
func (c *cluster) serverOf(role rpc.Role, token string) rpc.ClientConfig {
	return rpc.ClientConfig{TLS: rpc.TLS{CAFile: c.ca}, ServerName: role.ServerName(),
		Token: func() (string, error) { return token, nil }}
}

func podIn(namespace string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "stolen"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
}

func bindingIn(namespace string) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "stolen"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fast-sandbox-pool-namespace"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: system, Name: "controller"}}}
}
