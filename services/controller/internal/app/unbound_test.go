//go:build integration

package app_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// TestUnboundNamespace: a controller creates no Pod and reads no Secret where no administrator has bound it, and the pool says what
// to do about it.
func TestUnboundNamespace(t *testing.T) {
	env := newTestEnv(t)
	require.NoError(t, kube.Delete(env.ctx, env.binding()))
	env.start()
	env.pool()
	env.eventually(func() bool {
		c := poolCondition(env.getPool(), v1alpha1.ConditionReady)
		return c.Status == metav1.ConditionFalse && c.Reason == "NamespaceNotBound"
	}, func() string { return "the pool does not report that its namespace is not bound" })
	require.Contains(t, poolCondition(env.getPool(), v1alpha1.ConditionReady).Message, "kubectl create rolebinding fast-sandbox-controller --namespace "+
		env.namespace+" --clusterrole fast-sandbox-pool-namespace --serviceaccount "+systemNamespace+":controller")
	require.Empty(t, env.pods())

	env.permit()
	env.waitForAgents(1)
	env.eventually(func() bool {
		return poolCondition(env.getPool(), v1alpha1.ConditionProgressing).Reason == "AgentsComing"
	},
		func() string { return "the pool still reports that its namespace is not bound" })
}

// TestControllerCannotWriteElsewhere: the namespaces of a cluster that have no pool are closed to the controller's account.
func TestControllerCannotWriteElsewhere(t *testing.T) {
	controller, err := client.New(restConfig, client.Options{Scheme: kube.Scheme()})
	require.NoError(t, err)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "foreign"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
	require.True(t, apierrors.IsForbidden(controller.Create(t.Context(), pod)))
	require.True(t, apierrors.IsForbidden(controller.Delete(t.Context(), pod)))
	require.True(t, apierrors.IsForbidden(controller.Get(t.Context(), client.ObjectKey{Namespace: metav1.NamespaceSystem, Name: "any"}, &corev1.Secret{})))
	require.True(t, apierrors.IsForbidden(controller.List(t.Context(), &corev1.SecretList{})))
}
