package cluster_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/cluster"
	"github.com/fast-sandbox/fast-sandbox/deploy/local/internal/pki"
)

const manifests = `
apiVersion: v1
kind: Service
metadata: {name: s}
---
# a comment alone
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: d}
spec:
  template:
    metadata: {annotations: {mine: kept}}
    spec:
      initContainers: [{name: i, image: 'other:1'}]
      containers: [{name: c, image: 'fast-sandbox/allocator:dev'}, {name: x, image: 'docker.io/fast-sandbox/agent:dev'}]
---
apiVersion: fast-sandbox.io/v1alpha1
kind: SandboxPool
metadata: {name: default}
spec:
  agentTemplate:
    spec: {containers: [{name: agent, image: 'docker.io/fast-sandbox/agent:dev'}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: foreign}
spec: {template: {spec: {containers: [{name: c, image: 'foreign:1'}]}}}
`

func TestNoteDigests(t *testing.T) {
	digests := map[string]string{"docker.io/fast-sandbox/allocator:dev": "sha256:b", "docker.io/fast-sandbox/agent:dev": "sha256:a"}
	text, err := cluster.NoteDigests(manifests, digests)
	require.NoError(t, err)
	documents := strings.Split(text, "---\n")
	require.Len(t, documents, 5)
	annotations := func(i int, field string) map[string]any {
		var object map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(documents[i]), &object))
		template := object["spec"].(map[string]any)[field].(map[string]any)
		metadata, _ := template["metadata"].(map[string]any)
		found, _ := metadata["annotations"].(map[string]any)
		return found
	}
	const key = "local.fast-sandbox.io/image-digests"
	require.Equal(t, map[string]any{"mine": "kept", key: "sha256:a sha256:b"}, annotations(2, "template"))
	require.Equal(t, map[string]any{key: "sha256:a"}, annotations(3, "agentTemplate"))
	require.Empty(t, annotations(4, "template"), "what does not use our images is left as it is")

	again, err := cluster.NoteDigests(text, digests)
	require.NoError(t, err)
	require.Equal(t, text, again)
	_, err = cluster.NoteDigests("a: [", digests)
	require.Error(t, err)
}

func TestNormalize(t *testing.T) {
	for name, want := range map[string]string{
		"busybox":                           "docker.io/library/busybox:latest",
		"fast-sandbox/agent:dev":            "docker.io/fast-sandbox/agent:dev",
		"docker.io/fast-sandbox/agent:dev":  "docker.io/fast-sandbox/agent:dev",
		"localhost/x":                       "localhost/x:latest",
		"registry.example:5000/x":           "registry.example:5000/x:latest",
		"registry.example/x@sha256:abcdef0": "registry.example/x@sha256:abcdef0",
	} {
		require.Equal(t, want, cluster.Normalize(name))
	}
}

func TestTransient(t *testing.T) {
	require.True(t, cluster.Transient(`no matches for kind "SandboxPool" in version "fast-sandbox.io/v1alpha1"`))
	require.False(t, cluster.Transient(`Deployment.apps "x" is invalid: spec.replicas`))
}

func TestNodeReady(t *testing.T) {
	node := &corev1.Node{}
	ready, why := cluster.NodeReady(node)
	require.False(t, ready)
	require.Contains(t, why, "not reported")

	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "no CNI"}}
	ready, why = cluster.NodeReady(node)
	require.False(t, ready)
	require.Equal(t, "no CNI", why)

	node.Status.Conditions[0].Status = corev1.ConditionTrue
	node.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeNotReady}}
	ready, _ = cluster.NodeReady(node)
	require.False(t, ready, "Pods are not scheduled while the taint is there")

	node.Spec.Taints = nil
	ready, _ = cluster.NodeReady(node)
	require.True(t, ready)
}

func deployment(name string, want int32, status appsv1.DeploymentStatus) *appsv1.Deployment {
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: pki.SandboxNamespace, Generation: 2},
		Spec:       appsv1.DeploymentSpec{Replicas: &want}, Status: status,
	}
}

func TestPendingRollouts(t *testing.T) {
	set := fake.NewClientset(
		deployment("done", 2, appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 2}),
		deployment("none-wanted", 0, appsv1.DeploymentStatus{ObservedGeneration: 2}),
		deployment("unseen", 1, appsv1.DeploymentStatus{ObservedGeneration: 1, Replicas: 1, UpdatedReplicas: 1, AvailableReplicas: 1}),
		deployment("starting", 2, appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 2, AvailableReplicas: 1}),
		deployment("old-remains", 1, appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 2, UpdatedReplicas: 1, AvailableReplicas: 2}),
		&appsv1.DaemonSet{
			ObjectMeta: metav1.ObjectMeta{Name: "janitor", Namespace: pki.JanitorNamespace},
			Status:     appsv1.DaemonSetStatus{DesiredNumberScheduled: 1, UpdatedNumberScheduled: 1},
		},
	)
	pending, total, err := cluster.PendingRollouts(t.Context(), set)
	require.NoError(t, err)
	require.Equal(t, 6, total)
	require.ElementsMatch(t, []string{
		"deployment unseen (1 of 1)", "deployment starting (1 of 2)", "deployment old-remains (1 of 1)", "daemonset janitor (0 of 1)",
	}, pending)
}

func TestPodProblems(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: pki.SandboxNamespace}}
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Message: "no node"}}
	pod.Status.ContainerStatuses = []corev1.ContainerStatus{
		{Name: "good", Ready: true},
		{Name: "pulls", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull", Message: "no such image"}}},
		{
			Name:                 "crashes",
			State:                corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 2, Message: "bad flag"}},
		},
	}
	text := cluster.PodProblems(t.Context(), fake.NewClientset(pod))
	require.Contains(t, text, "pod p: no node")
	require.Contains(t, text, "container pulls: ErrImagePull no such image")
	require.Contains(t, text, "exited with code 2 bad flag")
	require.NotContains(t, text, "good")
	require.Equal(t, cluster.PodCounts{Total: 1}, cluster.CountPods([]corev1.Pod{*pod}))
}

// Every server has its Secret, the user of the machine has files instead, and a second run changes nothing.
func TestIdentities(t *testing.T) {
	c, set := config(t), fake.NewClientset()
	secrets := func() map[string]corev1.Secret {
		identities, err := cluster.EnsureIdentity(c, time.Now())
		require.NoError(t, err)
		require.NoError(t, cluster.ApplySecrets(t.Context(), set, identities))
		list, err := set.CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		found := make(map[string]corev1.Secret)
		for _, secret := range list.Items {
			found[secret.Name] = secret
		}
		return found
	}
	first := secrets()
	require.Len(t, first, 10)
	for _, name := range []string{
		"allocator-tls", "controller-tls", "gateway-tls", "janitor-tls", "gc-tls",
		"allocator-client-tls", "controller-client-tls", "gateway-client-tls", "metrics-client-tls", "agent-ca",
	} {
		secret := first[name]
		require.Equal(t, map[bool]string{false: "fast-sandbox-system", true: "fast-sandbox-janitor"}[name == "janitor-tls"], secret.Namespace, name)
		require.Equal(t, corev1.SecretTypeTLS, secret.Type)
		for _, key := range []string{"tls.crt", "tls.key", "ca.crt"} {
			require.Contains(t, string(secret.Data[key]), "-----BEGIN ", name+" "+key)
		}
	}
	for _, name := range []string{"ca.crt", "tls.crt", "tls.key"} {
		require.FileExists(t, c.ClientDir()+"/"+name)
	}
	second := secrets()
	for name := range first {
		require.Equal(t, first[name].Data, second[name].Data)
	}
}
