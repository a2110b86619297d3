package pools_test

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
)

func pool(namespace, name, uid string) *v1alpha1.SandboxPool {
	return &v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(uid)}}
}

func TestPools(t *testing.T) {
	p := pools.New()
	require.False(t, p.Synced())
	p.SetSynced()
	require.True(t, p.Synced())
	_, ok := p.Pool("a", "x")
	require.False(t, ok)
	for _, v := range []*v1alpha1.SandboxPool{pool("b", "x", "1"), pool("a", "y", "2"), pool("a", "x", "3")} {
		p.Set(v)
	}
	names := func(namespace string) (out []string) {
		for _, v := range p.List(namespace) {
			out = append(out, v.Namespace+"/"+v.Name)
		}
		return out
	}
	require.Equal(t, []string{"a/x", "a/y", "b/x"}, names(""))
	require.Equal(t, []string{"a/x", "a/y"}, names("a"))
	p.Set(pool("a", "x", "4"))
	p.Remove(pool("a", "x", "3"))
	got, ok := p.Pool("a", "x")
	require.True(t, ok, "the end of a former pool is not that of its successor")
	require.EqualValues(t, "4", got.UID)
	p.Remove(pool("a", "x", "4"))
	require.Equal(t, []string{"a/y"}, names("a"))
}

func TestResolve(t *testing.T) {
	p := pools.New()
	namespace := func(annotations map[string]string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns", Annotations: annotations}}
	}
	requireDefault := func(want string) {
		t.Helper()
		got, err := p.Resolve("ns", "")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := p.Resolve("ns", "")
	require.True(t, errdefs.IsUnavailable(err), "the annotation may not have been read yet: %v", err)
	named, err := p.Resolve("ns", "p")
	require.NoError(t, err)
	require.Equal(t, "p", named)
	p.SetNamespace(namespace(map[string]string{v1alpha1.AnnotationDefaultPool: "gpu"}))
	requireDefault("gpu")
	p.SetSynced()
	requireDefault("gpu")
	p.SetNamespace(namespace(nil))
	requireDefault("default")
	p.SetNamespace(namespace(map[string]string{v1alpha1.AnnotationDefaultPool: "gpu"}))
	p.RemoveNamespace(namespace(nil))
	requireDefault("default")
}
