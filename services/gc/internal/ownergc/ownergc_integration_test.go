//go:build integration

package ownergc_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func (w *testEnv) pool(name string, owners ...metav1.OwnerReference) *v1alpha1.SandboxPool {
	w.t.Helper()
	p := &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: owners},
		Spec: v1alpha1.SandboxPoolSpec{Capacity: v1alpha1.PoolCapacity{PoolMax: 1, BufferMax: 1}}}
	require.NoError(w.t, w.kube.Create(w.t.Context(), p))
	return p
}

func (w *testEnv) sandbox(name string, owners ...metav1.OwnerReference) *v1alpha1.Sandbox {
	w.t.Helper()
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: owners},
		Spec: v1alpha1.SandboxSpec{Image: "i", PoolRef: "p"}}
	require.NoError(w.t, w.kube.Create(w.t.Context(), s))
	return s
}

func TestBackgroundDeletionCascades(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	pool := w.pool("pool")
	sandbox := w.sandbox("sandbox", owner(pool, false))
	config := w.config("config", owner(sandbox, false))
	bystander := w.config("bystander")
	w.settled(pool, sandbox, config)
	w.delete(pool, metav1.DeletePropagationBackground)
	w.gone(sandbox, config)
	require.True(t, w.is(bystander))
}

func TestForegroundDeletionWaitsForBlockingDependents(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	root := w.config("root")
	middle := w.config("middle", owner(root, true))
	leaf := w.config("leaf", owner(middle, true))
	leaf.Finalizers = []string{holds}
	require.NoError(t, w.kube.Update(t.Context(), leaf))
	lax := w.config("lax", owner(root, false))
	w.settled(root, middle, leaf, lax)
	w.delete(root, metav1.DeletePropagationForeground)
	w.gone(lax)
	require.Eventually(t, func() bool { return w.is(leaf) && leaf.DeletionTimestamp != nil }, testkit.Timeout, testkit.Tick)
	require.True(t, w.is(middle))
	require.Contains(t, middle.Finalizers, metav1.FinalizerDeleteDependents)
	require.True(t, w.is(root))
	leaf.Finalizers = nil
	require.NoError(t, w.kube.Update(t.Context(), leaf))
	w.gone(leaf, middle, root)
}

func TestOrphanedDependentsStay(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	root := w.config("root")
	keeper := w.config("keeper")
	a := w.config("a", owner(root, true))
	b := w.config("b", owner(root, true), owner(keeper, true))
	below := w.config("below", owner(a, true))
	w.settled(root, a, b, below)
	w.delete(root, metav1.DeletePropagationOrphan)
	w.gone(root)
	require.Empty(t, w.owners(a))
	require.Equal(t, []string{"keeper"}, w.owners(b))
	require.Equal(t, []string{"a"}, w.owners(below))
	w.settled(a, b, below)
}

func TestDanglingReferenceIsRemovedIfAnotherOwnerStays(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	keeper := w.config("keeper")
	ref := owner(keeper, false)
	ref.Name, ref.UID = "never", "00000000-0000-0000-0000-000000000000"
	shared := w.config("shared", ref, owner(keeper, true))
	require.Eventually(t, func() bool { return len(w.owners(shared)) == 1 }, testkit.Timeout, testkit.Tick)
	require.Equal(t, owner(keeper, true), shared.OwnerReferences[0])
	w.gone(w.config("garbage", ref))
	ref = owner(keeper, false)
	ref.UID = "00000000-0000-0000-0000-000000000001"
	w.gone(w.config("another-had-that-name", ref))
}

func TestCycleIsDeleted(t *testing.T) {
	for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationBackground, metav1.DeletePropagationForeground} {
		w := newTestEnv(t)
		w.start(w.rest)
		a := w.config("a")
		b := w.config("b", owner(a, true))
		c := w.config("c", owner(b, true))
		a.OwnerReferences = []metav1.OwnerReference{owner(c, true)}
		require.NoError(t, w.kube.Update(t.Context(), a))
		w.settled(a, b, c)
		w.delete(a, policy)
		w.gone(a, b, c)
		w.stop()
	}
}

func TestReferencesAcrossNamespaces(t *testing.T) {
	w := newTestEnv(t)
	elsewhere := newTestEnv(t)
	w.start(w.rest)
	stranger := elsewhere.config("owner")
	w.gone(w.config("dependent", owner(stranger, false)))
	require.Contains(t, w.event(), "Warning OwnerRefInvalidNamespace")
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.namespace, OwnerReferences: []metav1.OwnerReference{owner(stranger, false)}}}
	require.NoError(t, w.kube.Create(t.Context(), role))
	require.Contains(t, w.event(), "Warning OwnerRefInvalidNamespace")
	elsewhere.delete(stranger, metav1.DeletePropagationBackground)
	w.gone(stranger)
	w.settled(role)
	// The reverse is valid: a cluster-scoped owner of a namespaced object.
	w.delete(role, metav1.DeletePropagationBackground)
	keeper := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: w.namespace + "-2"}}
	require.NoError(t, w.kube.Create(t.Context(), keeper))
	d := w.config("d", owner(keeper, false))
	w.settled(d)
	w.delete(keeper, metav1.DeletePropagationBackground)
	w.gone(d)
}

func TestUnknownKindKeepsItsDependents(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	d := w.config("d", metav1.OwnerReference{APIVersion: "absent.example.com/v1", Kind: "Nothing", Name: "n", UID: "x"})
	v := w.config("v", metav1.OwnerReference{APIVersion: "v9", Kind: "ConfigMap", Name: "n", UID: "y"})
	w.settled(d, v)
}

// widgets returns a CustomResourceDefinition.
func widgets(group string) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "widgets." + group},
		"spec": map[string]any{
			"group": group, "scope": "Namespaced",
			"names": map[string]any{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
			"versions": []any{map[string]any{"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}},
		}}}
}

// TestKindIsAddedAndRemoved: a new kind is watched soon. When it is removed, dependents of its objects are deleted with them, and
// its objects block no deletion.
func TestKindIsAddedAndRemoved(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	group := w.namespace + ".example.com"
	crd := widgets(group)
	require.NoError(t, w.kube.Create(t.Context(), crd))
	widget := func(name string, owners ...metav1.OwnerReference) *unstructured.Unstructured {
		o := &unstructured.Unstructured{}
		o.SetGroupVersionKind(schema.GroupVersionKind{Group: group, Version: "v1", Kind: "Widget"})
		o.SetNamespace(w.namespace)
		o.SetName(name)
		o.SetOwnerReferences(owners)
		require.Eventually(t, func() bool { return w.kube.Create(t.Context(), o) == nil }, testkit.Timeout, testkit.Tick)
		return o
	}
	a := widget("a")
	d := w.config("d", owner(a, false))
	root := w.config("root")
	b := widget("b", owner(root, true))
	w.settled(a, b, d, root)
	w.delete(a, metav1.DeletePropagationBackground)
	w.gone(d)
	left := w.config("left", owner(b, false))
	w.settled(left)
	w.delete(crd, metav1.DeletePropagationBackground)
	require.Eventually(t, func() bool { _, ok := w.collector.Failing()["widgets."+group]; return !w.is(crd) && !ok }, testkit.Timeout, testkit.Tick)
	w.gone(left) // its owner was deleted before the kind was removed
	w.delete(root, metav1.DeletePropagationForeground)
	w.gone(root)
}

func TestRestartResumes(t *testing.T) {
	w := newTestEnv(t)
	root := w.config("root")
	middle := w.config("middle", owner(root, true))
	leaf := w.config("leaf", owner(middle, true))
	lost := w.config("lost")
	left := w.config("left", owner(lost, true))
	freed := w.config("freed")
	free := w.config("free", owner(freed, true))
	w.delete(root, metav1.DeletePropagationForeground)
	w.delete(lost, metav1.DeletePropagationBackground)
	w.delete(freed, metav1.DeletePropagationOrphan)
	w.start(w.rest)
	w.gone(root, middle, leaf, left, freed)
	require.Empty(t, w.owners(free))
}

func TestNothingIsWrittenWithoutPermission(t *testing.T) {
	w := newTestEnv(t)
	w.permit(errors.New("another leads"))
	w.start(w.rest)
	root := w.config("root")
	d := w.config("d", owner(root, false))
	w.settled(root, d)
	w.delete(root, metav1.DeletePropagationBackground)
	last := w.config("last")
	w.settled(last)
	require.True(t, w.is(d))
	w.permit(nil)
	w.collector.Resume(t.Context())
	w.gone(d)
}

func TestObjectsOutOfScopeAreNotTouched(t *testing.T) {
	w := newTestEnv(t)
	w.scope = func(group string) bool { return group == v1alpha1.Group }
	w.start(w.rest)
	root := w.config("root")
	in, out := w.sandbox("in", owner(root, false)), w.config("out", owner(root, false))
	w.settled(root, in, out)
	w.delete(root, metav1.DeletePropagationBackground)
	w.gone(in)
	require.True(t, w.is(out))
}

// TestForbiddenResource is reported. Other resources are collected; dependents of its objects stay.
func TestForbiddenResource(t *testing.T) {
	w := newTestEnv(t)
	name := w.namespace
	role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, Verbs: []string{"*"}}}}
	require.NoError(t, w.kube.Create(t.Context(), role))
	require.NoError(t, w.kube.Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}}}))
	user, err := w.env.AddUser(envtest.User{Name: name, Groups: []string{"system:authenticated"}}, nil)
	require.NoError(t, err)
	secret := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "s"}}
	require.NoError(t, w.kube.Create(t.Context(), secret))
	stays := w.config("stays", owner(secret, false))
	asUser := user.Config()
	asUser.QPS = -1
	w.start(asUser)
	require.Eventually(t, func() bool { return strings.Contains(w.collector.Failing()["secrets"], "forbidden") }, testkit.Timeout, testkit.Tick)
	root := w.config("root")
	d := w.config("d", owner(root, false))
	w.settled(d)
	w.delete(root, metav1.DeletePropagationBackground)
	w.gone(d)
	require.NoError(t, w.kube.Delete(t.Context(), secret))
	require.True(t, w.is(stays), "no evidence that its owner is deleted")
}

// TestConstantChangesDoNotPreventDeletion: most writes conflict.
func TestConstantChangesDoNotPreventDeletion(t *testing.T) {
	w := newTestEnv(t)
	w.start(w.rest)
	root := w.config("root")
	d := w.config("d", owner(root, false))
	w.settled(d)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			patch := client.RawPatch("application/merge-patch+json", []byte(`{"data":{"i":"`+strings.Repeat("x", i%50)+`"}}`))
			if err := w.kube.Patch(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "d"}}, patch); err != nil {
				return // it was deleted
			}
		}
	}()
	w.delete(root, metav1.DeletePropagationBackground)
	w.gone(d)
	<-done
}

// slow delays the lists of Secrets.
type slow struct {
	metadata.Interface
	release chan struct{}
}

func (s slow) Resource(r schema.GroupVersionResource) metadata.Getter {
	if r.Resource != "secrets" {
		return s.Interface.Resource(r)
	}
	return slowSecrets{s.Interface.Resource(r), s.release}
}

type slowSecrets struct {
	metadata.Getter
	release chan struct{}
}

func (s slowSecrets) List(ctx context.Context, o metav1.ListOptions) (*metav1.PartialObjectMetadataList, error) {
	select {
	case <-s.release:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	return s.Getter.List(ctx, o)
}

func (s slowSecrets) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	if ptr.Deref(o.SendInitialEvents, false) { // a streaming list
		select {
		case <-s.release:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.Getter.Watch(ctx, o)
}

// TestOwnerIsNotFinalizedBeforeItsDependentsAreListed, although the workers have started.
func TestOwnerIsNotFinalizedBeforeItsDependentsAreListed(t *testing.T) {
	w := newTestEnv(t)
	freed, waits := w.config("freed"), w.config("waits")
	secret := func(name string, o *corev1.ConfigMap) *corev1.Secret {
		s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: []metav1.OwnerReference{owner(o, true)}}}
		require.NoError(t, w.kube.Create(t.Context(), s))
		return s
	}
	free, blocks := secret("free", freed), secret("blocks", waits)
	w.delete(freed, metav1.DeletePropagationOrphan)
	w.delete(waits, metav1.DeletePropagationForeground)
	release := make(chan struct{})
	w.wrap = func(m metadata.Interface) metadata.Interface { return slow{m, release} }
	w.start(w.rest)
	<-w.collector.Synced()
	garbage := owner(freed, false)
	garbage.UID = "00000000-0000-0000-0000-000000000002"
	w.gone(w.config("garbage", garbage)) // the workers run
	require.True(t, w.is(freed))
	require.True(t, w.is(waits))
	close(release)
	w.gone(freed, blocks, waits)
	require.Empty(t, w.owners(free))
	w.settled(free)
}

// TestUnavailableAPIService is an API group of an aggregated server that does not answer. Other resources are collected;
// dependents of its objects stay.
func TestUnavailableAPIService(t *testing.T) {
	w := newTestEnv(t)
	group := w.namespace + ".example.com"
	down := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": map[string]any{"name": "v1." + group},
		"spec": map[string]any{"group": group, "version": "v1", "groupPriorityMinimum": int64(100), "versionPriority": int64(10), "insecureSkipTLSVerify": true,
			"service": map[string]any{"namespace": w.namespace, "name": "nowhere"}},
	}}
	require.NoError(t, w.kube.Create(t.Context(), down))
	t.Cleanup(func() { require.NoError(t, w.kube.Delete(context.Background(), down)) })
	disco, err := discovery.NewDiscoveryClientForConfig(w.rest)
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		_, _, err := disco.ServerGroupsAndResources()
		return discovery.IsGroupDiscoveryFailedError(err)
	}, testkit.Timeout, testkit.Tick, "it is not seen to be down")
	w.start(w.rest)
	stays := w.config("stays", metav1.OwnerReference{APIVersion: group + "/v1", Kind: "Thing", Name: "x", UID: "x"})
	root := w.config("root")
	d := w.config("d", owner(root, false))
	w.settled(stays, d)
	w.delete(root, metav1.DeletePropagationForeground)
	w.gone(d, root)
	require.True(t, w.is(stays))
}
