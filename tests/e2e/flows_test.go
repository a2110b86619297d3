//go:build e2e

package e2e_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// flowTime is how long one step of a flow may take. The intervals of seed 002 are a few seconds; a busy machine may be
// slower.
const flowTime = "60s"

// kubectl runs kubectl, which must succeed.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return cluster.OK(t, "kubectl", args...)
}

// apply applies a manifest.
func apply(t *testing.T, object any) {
	t.Helper()
	raw, err := yaml.Marshal(object)
	require.NoError(t, err)
	r := cluster.Run(t, string(raw), "kubectl", "apply", "-f", "-")
	require.Zero(t, r.Code, "%s\n%s", r.Stderr, raw)
}

// sandboxManifest returns a Sandbox whose process keeps running.
func sandboxManifest(name, pool string) *v1alpha1.Sandbox {
	s := &v1alpha1.Sandbox{}
	s.APIVersion, s.Kind = v1alpha1.GroupVersion.String(), "Sandbox"
	s.Namespace, s.Name = cluster.Namespace, name
	s.Spec = v1alpha1.SandboxSpec{Image: cluster.Busybox, PoolRef: pool, Command: []string{"sh", "-c", runOn}}
	return s
}

// runOn is a process that runs until SIGTERM.
const runOn = "trap 'exit 0' TERM; sleep 100000 & wait"

// field reads one field of a sandbox's custom resource by kubectl.
func field(t *testing.T, name, path string) string {
	t.Helper()
	return kubectl(t, "get", "sbx", name, "-o", "jsonpath={"+path+"}")
}

// waitFor waits until kubectl sees a field's value.
func waitFor(t *testing.T, kind, name, path, value string) {
	t.Helper()
	r := cluster.Run(t, "", "kubectl", "wait", kind+"/"+name, "--for=jsonpath={"+path+"}="+value, "--timeout="+flowTime)
	if r.Code != 0 {
		t.Fatalf("%s %s: %s is not %s: %s\n%s", kind, name, path, value, r.Stderr, cluster.Run(t, "", "kubectl", "get", kind, name, "-o", "yaml").Stdout)
	}
}

// ownPool creates a pool for one test, with one small agent that is ready, and deletes it when the test ends.
func ownPool(t *testing.T, prefix string, change func(*v1alpha1.SandboxPool)) string {
	t.Helper()
	kube := cluster.Kube(t)
	like := &v1alpha1.SandboxPool{}
	require.NoError(t, kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: cluster.Pool}, like))
	p := &v1alpha1.SandboxPool{Spec: like.Spec}
	p.APIVersion, p.Kind = v1alpha1.GroupVersion.String(), "SandboxPool"
	p.Namespace, p.Name = cluster.Namespace, uniqueName(prefix)
	p.Spec.MaxSandboxesPerPod = 8
	p.Spec.Capacity = v1alpha1.PoolCapacity{PoolMin: 1, PoolMax: 2}
	if change != nil {
		change(p)
	}
	apply(t, p)
	t.Cleanup(func() {
		kubectl(t, "delete", "sbx", "-l", v1alpha1.LabelPool+"="+p.Name, "--ignore-not-found", "--timeout="+flowTime)
		kubectl(t, "delete", "sbp", p.Name, "--ignore-not-found", "--timeout="+flowTime)
		nodeEmptied(t, p.Name)
	})
	waitFor(t, "sbp", p.Name, ".status.readyAgents", "1")
	return p.Name
}

// agentOf returns the Pod of a pool's first agent.
func agentOf(t *testing.T, pool string) string {
	t.Helper()
	return strings.TrimSpace(kubectl(t, "get", "pods", "-l", v1alpha1.LabelPool+"="+pool, "-o", "jsonpath={.items[0].metadata.name}"))
}

// killAgentPod deletes an agent's Pod without waiting for the kubelet, as the loss of a node does.
func killAgentPod(t *testing.T, pool string) {
	t.Helper()
	kubectl(t, "delete", "pod", agentOf(t, pool), "--force", "--grace-period=0")
}

// read reads a sandbox's custom resource.
func read(t *testing.T, name string) *v1alpha1.Sandbox {
	t.Helper()
	s := &v1alpha1.Sandbox{}
	require.NoError(t, json.Unmarshal([]byte(kubectl(t, "get", "sbx", name, "-o", "json")), s))
	return s
}

// conditionOf returns the status of a sandbox's condition; Unknown if there is none.
func conditionOf(s *v1alpha1.Sandbox, kind string) metav1.ConditionStatus {
	for _, c := range s.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return metav1.ConditionUnknown
}

// emptied waits until the node has nothing of a sandbox. Its custom resource may exist.
func emptied(t *testing.T, uid string) {
	t.Helper()
	var left []string
	require.True(t, eventually(4*settle, func() bool {
		left = leftovers(t.Context(), t, nodeClient(t), uid)
		return len(left) == 0
	}), "left: %v", left)
}

// inTime formats a time as kubectl's user would write it.
func inTime(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }
