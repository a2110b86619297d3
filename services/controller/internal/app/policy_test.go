//go:build integration

package app_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

// applyPolicy installs the optional policy for the test's namespace alone.
func (env *testEnv) applyPolicy() {
	t := env.t
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "deploy", "components", "annotation-policy", "policy.yaml"))
	require.NoError(t, err)
	documents := strings.Split(string(raw), "\n---\n")
	require.Len(t, documents, 2)
	policy, binding := &admissionv1.ValidatingAdmissionPolicy{}, &admissionv1.ValidatingAdmissionPolicyBinding{}
	require.NoError(t, yaml.UnmarshalStrict([]byte(documents[0]), policy))
	require.NoError(t, yaml.UnmarshalStrict([]byte(documents[1]), binding))
	require.Equal(t, policy.Name, binding.Spec.PolicyName)
	binding.Spec.MatchResources = &admissionv1.MatchResources{NamespaceSelector: &metav1.LabelSelector{
		MatchLabels: map[string]string{"kubernetes.io/metadata.name": env.namespace}}}
	for _, o := range []client.Object{policy, binding} {
		require.NoError(t, kube.Create(env.ctx, o))
		t.Cleanup(func() { require.NoError(t, client.IgnoreNotFound(kube.Delete(context.WithoutCancel(env.ctx), o))) })
	}
}

// as returns a client with all rights under a user's name.
func (env *testEnv) as(user string) client.Client {
	cfg := rest.CopyConfig(adminConf)
	cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:masters"}}
	c, err := client.New(cfg, client.Options{Scheme: kube.Scheme()})
	require.NoError(env.t, err)
	return c
}

// TestAnnotationPolicy: users write no annotations of Fast Sandbox, and everything else.
func TestAnnotationPolicy(t *testing.T) {
	env := newTestEnv(t)
	env.applyPolicy()
	user, controller := env.as("jane"), env.as("system:serviceaccount:"+systemNamespace+":controller")
	forged := func(name string) *v1alpha1.Sandbox {
		return &v1alpha1.Sandbox{
			ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: name, Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: "victim", "other": "x"}},
			Spec:       v1alpha1.SandboxSpec{Image: "busybox"},
		}
	}
	// The API server needs a moment until it enforces a new policy.
	env.eventually(func() bool {
		return apierrors.IsForbidden(user.Create(env.ctx, forged("forged"), client.DryRunAll))
	}, func() string { return "the policy is not in force" })
	err := user.Create(env.ctx, forged("forged"))
	require.True(t, apierrors.IsForbidden(err), "%v", err)
	require.ErrorContains(t, err, "annotations of fast-sandbox.io are written by Fast Sandbox alone")

	s := forged("s")
	delete(s.Annotations, v1alpha1.AnnotationSandboxUID)
	require.NoError(t, user.Create(env.ctx, s))
	change := func(c client.Client, do func(*v1alpha1.Sandbox)) error {
		var now v1alpha1.Sandbox
		require.NoError(t, kube.Get(env.ctx, client.ObjectKeyFromObject(s), &now))
		next := now.DeepCopy()
		if next.Annotations == nil {
			next.Annotations = map[string]string{}
		}
		do(next)
		return c.Patch(env.ctx, next, client.MergeFrom(&now))
	}
	add := func(s *v1alpha1.Sandbox) { s.Annotations[v1alpha1.AnnotationAssignment] = "{}" }
	require.True(t, apierrors.IsForbidden(change(user, add)))
	require.NoError(t, change(controller, add))
	require.True(t, apierrors.IsForbidden(change(user, func(s *v1alpha1.Sandbox) { s.Annotations[v1alpha1.AnnotationAssignment] = "" })))
	require.True(t, apierrors.IsForbidden(change(user, func(s *v1alpha1.Sandbox) { delete(s.Annotations, v1alpha1.AnnotationAssignment) })))
	require.NoError(t, change(user, func(s *v1alpha1.Sandbox) { s.Annotations["other"] = "y"; s.Labels = map[string]string{"a": "b"} }), "what is there stays")
	require.NoError(t, user.Delete(env.ctx, s))
}
