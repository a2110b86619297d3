package app

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// decoded is a custom resource as a decoder makes it: every text is its own.
func decoded(name string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{
		Name: name, Namespace: strings.Clone("ns"), Finalizers: []string{strings.Clone("f")},
		Labels:          map[string]string{strings.Clone("team"): strings.Clone("blue")},
		Annotations:     map[string]string{v1alpha1.AnnotationSandboxUID: name, corev1.LastAppliedConfigAnnotation: "{}"},
		OwnerReferences: []metav1.OwnerReference{{Kind: "Job", Name: "j", UID: "u"}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
	}}
	sb.Spec = v1alpha1.SandboxSpec{
		Image: strings.Clone("python"), PoolRef: "p", Command: []string{strings.Clone("sh")}, Args: []string{"-c"},
		Envs: []v1alpha1.EnvVar{{Name: strings.Clone("TENANT"), Value: name}}, Network: v1alpha1.NetworkModeNone,
	}
	sb.Status = v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseRunning, NodeName: "n", Conditions: []metav1.Condition{{Type: "Ready", Status: "True", Reason: "Up"}}}
	return sb
}

func TestCompactLosesNothing(t *testing.T) {
	want := decoded("one")
	want.ManagedFields = nil
	delete(want.Annotations, corev1.LastAppliedConfigAnnotation)
	got, err := compact(decoded("one"))
	require.NoError(t, err)
	require.Equal(t, want, got)
	_, err = compact("another kind of object")
	require.NoError(t, err)
}

func TestCompactSharesTexts(t *testing.T) {
	one, err := compact(decoded("one"))
	require.NoError(t, err)
	two, err := compact(decoded("two"))
	require.NoError(t, err)
	texts := func(o any) []string {
		sb := o.(*v1alpha1.Sandbox)
		return []string{sb.Namespace, sb.Finalizers[0], sb.Spec.Image, sb.Spec.Command[0], sb.Spec.Envs[0].Name}
	}
	for i, text := range texts(one) {
		require.Same(t, unsafe.StringData(text), unsafe.StringData(texts(two)[i]), text)
	}
}
