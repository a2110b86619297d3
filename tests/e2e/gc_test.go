//go:build e2e

package e2e_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

const (
	// held is a finalizer that only these tests remove.
	held = "fast-sandbox.io/e2e-held"
	// quarantine is gc's default; checkInterval and podsKept are set by the local overlay.
	quarantine    = 40 * time.Second
	checkInterval = 5 * time.Second
	podsKept      = 100
	// collected is how long a cascade may take on a busy machine.
	collected = time.Minute
)

// TestGarbageCollection checks that the local cluster's only garbage collector does what kube-controller-manager's do elsewhere.
func TestGarbageCollection(t *testing.T) {
	require.True(t, eventually(collected, func() bool { return enforcing(t) == 1 }), "one collector enforces: %s", cluster.Run(t, "", "fsb-ctl", "gc", "status").Stdout)
	t.Run("cascades", func(t *testing.T) { // returns when all of them have ended
		t.Run("background", func(t *testing.T) { t.Parallel(); collectsInTheBackground(t) })
		t.Run("foreground", func(t *testing.T) { t.Parallel(); collectsInTheForeground(t) })
		t.Run("orphan", func(t *testing.T) { t.Parallel(); leavesOrphans(t) })
		t.Run("job", func(t *testing.T) { t.Parallel(); collectsJobs(t) })
		t.Run("namespace", func(t *testing.T) { t.Parallel(); emptiesNamespaces(t) })
		t.Run("pool", func(t *testing.T) { t.Parallel(); collectsAgents(t) })
		t.Run("finished Pods", func(t *testing.T) { t.Parallel(); collectsFinishedPods(t) })
		t.Run("Pods of a lost node", func(t *testing.T) { t.Parallel(); collectsPodsOfALostNode(t) })
		t.Run("Pods without a node", func(t *testing.T) { t.Parallel(); collectsPodsWithoutANode(t) })
	})
	t.Run("restart", collectsAfterARestart)
}

// enforcing returns the number of collectors that delete.
func enforcing(t *testing.T) (n int) {
	t.Helper()
	var out struct {
		Collectors []struct {
			Status struct{ Enforcing bool }
		}
	}
	r := cluster.Run(t, "", "fsb-ctl", "gc", "status", "-o", "json")
	if r.Code == 0 {
		require.NoError(t, json.Unmarshal([]byte(r.Stdout), &out))
	}
	for _, c := range out.Collectors {
		if c.Status.Enforcing {
			n++
		}
	}
	return n
}

const deploymentManifest = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: NAME, namespace: NAMESPACE}
spec:
  replicas: 2
  selector: {matchLabels: {e2e: NAME}}
  template:
    metadata: {labels: {e2e: NAME}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
        - {name: c, image: docker.io/fast-sandbox/busybox:demo, command: [sh, -c, "trap 'exit 0' TERM; sleep 100000 & wait"]}
`

// deployed creates a Deployment with two running Pods.
func deployed(t *testing.T, namespace, prefix string) (name string) {
	t.Helper()
	name = uniqueName(prefix)
	r := cluster.Run(t, strings.NewReplacer("NAMESPACE", namespace, "NAME", name).Replace(deploymentManifest), "kubectl", "apply", "-f", "-")
	require.Zero(t, r.Code, r.Stderr)
	t.Cleanup(func() {
		kubectl(t, "-n", namespace, "delete", "deploy,rs,pod", "-l", "e2e="+name, "--ignore-not-found", "--timeout="+flowTime)
	})
	kubectl(t, "-n", namespace, "rollout", "status", "deploy/"+name, "--timeout="+flowTime)
	return name
}

// named returns the names of objects of the kinds with a label.
func named(t *testing.T, kinds, label string) []string {
	t.Helper()
	return strings.Fields(kubectl(t, "get", kinds, "-l", label, "-o", "name"))
}

// noneLeft waits until no object of the kinds with a label exists.
func noneLeft(t *testing.T, kinds, label string) {
	t.Helper()
	require.True(t, eventually(collected, func() bool { return len(named(t, kinds, label)) == 0 }), "left: %v", named(t, kinds, label))
}

// explained waits until the collector's explanation of an object has the expected parts.
func explained(t *testing.T, object string, want ...string) {
	t.Helper()
	var r cluster.Result
	require.True(t, eventually(collected, func() bool {
		r = cluster.Run(t, "", "fsb-ctl", "gc", "explain", object)
		for _, part := range want {
			if !strings.Contains(r.Stdout, part) {
				return false
			}
		}
		return r.Code == 0
	}), "want %q, got %s%s", want, r.Stdout, r.Stderr)
}

// watchDeletions runs fsb-ctl gc watch, and returns once it misses no deletion. cause waits until it reports an object, and
// returns why that was deleted.
func watchDeletions(t *testing.T) (cause func(kind, name string) string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	cmd := exec.CommandContext(ctx, cluster.Binary(t, "fsb-ctl"), "gc", "watch", "-o", "json")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	notes, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
	lines := bufio.NewScanner(notes)
	require.True(t, lines.Scan(), "fsb-ctl gc watch ended")
	require.Contains(t, lines.Text(), "watching deletions in namespace default")
	events := bufio.NewScanner(out)
	return func(kind, name string) string {
		deadline := time.AfterFunc(collected, cancel)
		defer deadline.Stop()
		for events.Scan() {
			var e struct {
				Object struct {
					Place struct {
						Kind struct{ Kind string }
						Name string
					}
				}
				Cause string
			}
			require.NoError(t, json.Unmarshal(events.Bytes(), &e))
			if e.Object.Place.Kind.Kind == kind && strings.HasPrefix(e.Object.Place.Name, name) {
				return e.Cause
			}
		}
		return "not reported"
	}
}

func collectsInTheBackground(t *testing.T) {
	name := deployed(t, cluster.Namespace, "background")
	pod := named(t, "pods", "e2e="+name)[0]
	explained(t, pod, "Owned, an owner keeps it", "  Deployment.apps/"+name+"\n", "  └─ ReplicaSet.apps/"+name, "     └─ Pod/"+name)
	preview := cluster.OK(t, "fsb-ctl", "gc", "preview", "deploy/"+name)
	require.Contains(t, preview, "\n4 would be deleted (2 Pod, 1 Deployment.apps, 1 ReplicaSet.apps)\n")
	require.Contains(t, cluster.OK(t, "fsb-ctl", "gc", "preview", "deployment.apps", name, "--cascade", "orphan"), "\n1 would be deleted (1 Deployment.apps)\n")
	dot := cluster.OK(t, "fsb-ctl", "gc", "graph", "deploy/"+name, "-o", "dot")
	require.Equal(t, 3, strings.Count(dot, " -> "), "a ReplicaSet, and two Pods: %s", dot)
	cause := watchDeletions(t)
	kubectl(t, "delete", "deploy", name, "--cascade=background", "--timeout="+flowTime)
	require.Equal(t, "CAUSE_OWNERS_GONE", cause("ReplicaSet", name))
	require.Equal(t, "CAUSE_OWNERS_GONE", cause("Pod", name))
	noneLeft(t, "rs,pods", "e2e="+name)
	r := cluster.Run(t, "", "fsb-ctl", "gc", "explain", "deploy/"+name)
	require.Equal(t, 3, r.Code)
	require.Contains(t, r.Stderr, "OBJECT_NOT_FOUND")
}

// The Deployment exists as long as its dependents.
func collectsInTheForeground(t *testing.T) {
	name := deployed(t, cluster.Namespace, "foreground")
	pod := named(t, "pods", "e2e="+name)[0]
	kubectl(t, "patch", pod, "--type=merge", "-p", `{"metadata":{"finalizers":["`+held+`"]}}`)
	kubectl(t, "delete", "deploy", name, "--cascade=foreground", "--wait=false")
	explained(t, "deploy/"+name, "AwaitsDependents", "ReplicaSet.apps default/"+name)
	explained(t, pod, "being deleted", "- "+held)
	kubectl(t, "patch", pod, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	kubectl(t, "wait", "deploy/"+name, "--for=delete", "--timeout="+flowTime)
	require.Empty(t, named(t, "rs,pods", "e2e="+name), "the owner was deleted before the dependent that blocks it")
}

func leavesOrphans(t *testing.T) {
	name := deployed(t, cluster.Namespace, "orphan")
	pods := named(t, "pods", "e2e="+name)
	kubectl(t, "delete", "deploy", name, "--cascade=orphan", "--timeout="+flowTime)
	sets := named(t, "rs", "e2e="+name)
	require.Len(t, sets, 1)
	require.Empty(t, kubectl(t, "get", sets[0], "-o", "jsonpath={.metadata.ownerReferences}"))
	explained(t, sets[0], "Free, it has no owner")
	kubectl(t, "delete", sets[0], "--cascade=orphan", "--timeout="+flowTime)
	require.ElementsMatch(t, pods, named(t, "pods", "e2e="+name), "the Pods that ran before")
	for _, pod := range pods {
		require.Empty(t, kubectl(t, "get", pod, "-o", "jsonpath={.metadata.ownerReferences}{.metadata.deletionTimestamp}"))
	}
}

func collectsJobs(t *testing.T) {
	name := uniqueName("job")
	r := cluster.Run(t, strings.ReplaceAll(`
apiVersion: batch/v1
kind: Job
metadata: {name: NAME, namespace: default}
spec:
  completions: 2
  parallelism: 2
  template:
    metadata: {labels: {e2e: NAME}}
    spec: {restartPolicy: Never, containers: [{name: c, image: 'docker.io/fast-sandbox/busybox:demo', command: [echo, done]}]}
`, "NAME", name), "kubectl", "apply", "-f", "-")
	require.Zero(t, r.Code, r.Stderr)
	kubectl(t, "wait", "job/"+name, "--for=condition=Complete", "--timeout="+flowTime)
	kubectl(t, "delete", "job", name, "--timeout="+flowTime)
	noneLeft(t, "pods", "e2e="+name)
}

// The namespace controller deletes a namespace's objects; dependents must neither block it nor be created again.
func emptiesNamespaces(t *testing.T) {
	namespace := uniqueName("gc")
	kubectl(t, "create", "namespace", namespace)
	name := uniqueName("inside")
	r := cluster.Run(t, strings.NewReplacer("NAMESPACE", namespace, "NAME", name).Replace(deploymentManifest), "kubectl", "apply", "-f", "-")
	require.Zero(t, r.Code, r.Stderr)
	kubectl(t, "-n", namespace, "rollout", "status", "deploy/"+name, "--timeout="+flowTime)
	kubectl(t, "delete", "namespace", namespace, "--timeout="+flowTime)
}

// A pool that is deleted in the foreground does not wait for its sandboxes: its agents' Pods are deleted first.
func collectsAgents(t *testing.T) {
	pool := ownPool(t, "gcpool", nil)
	agent := agentOf(t, pool)
	explained(t, "pod/"+agent, "SandboxPool.fast-sandbox.io/"+pool, "└─ Pod/"+agent)
	require.Contains(t, cluster.OK(t, "fsb-ctl", "gc", "preview", "sbp/"+pool, "--cascade", "foreground"), "─ Pod/"+agent)
	kubectl(t, "delete", "sbp", pool, "--cascade=foreground", "--timeout="+flowTime)
	noneLeft(t, "pods", v1alpha1.LabelPool+"="+pool)
}

// idlePod returns a Pod that no scheduler handles.
func idlePod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: name},
		Spec: corev1.PodSpec{SchedulerName: "none", AutomountServiceAccountToken: ptr.To(false),
			Containers: []corev1.Container{{Name: "c", Image: cluster.Busybox}}},
	}
}

// Evicted Pods are deleted first, then the oldest.
func collectsFinishedPods(t *testing.T) {
	kube, label := cluster.Kube(t), uniqueName("finished")
	t.Cleanup(func() { kubectl(t, "delete", "pods", "-l", "e2e="+label, "--timeout="+flowTime) })
	name := func(i int) string { return fmt.Sprintf("%s-%03d", label, i) }
	const made = podsKept + 5
	for i := range made {
		p := idlePod(name(i))
		p.Labels = map[string]string{"e2e": label}
		require.NoError(t, kube.Create(t.Context(), p))
		p.Status.Phase = corev1.PodSucceeded
		if i == made-1 {
			p.Status.Phase, p.Status.Reason = corev1.PodFailed, "Evicted"
		}
		require.NoError(t, kube.Status().Update(t.Context(), p))
	}
	there := func(i int) bool {
		err := kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: name(i)}, &corev1.Pod{})
		if !apierrors.IsNotFound(err) {
			require.NoError(t, err)
		}
		return err == nil
	}
	require.True(t, eventually(collected, func() bool { return !there(made-1) && !there(0) }), "too many finished Pods are kept")
	require.True(t, there(made-2), "the newest is kept")
}

// going waits until a Pod is failed and being deleted, and reads it.
func going(t *testing.T, within time.Duration, p *corev1.Pod) {
	t.Helper()
	kube := cluster.Kube(t)
	require.True(t, eventually(within, func() bool {
		require.NoError(t, kube.Get(t.Context(), client.ObjectKeyFromObject(p), p))
		return p.DeletionTimestamp != nil && p.Status.Phase == corev1.PodFailed
	}), "phase %s, deletion %v", p.Status.Phase, p.DeletionTimestamp)
}

// release removes the finalizer by which a test keeps a Pod that is being deleted.
func release(t *testing.T, p *corev1.Pod) {
	t.Helper()
	kubectl(t, "patch", "pod", p.Name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	kubectl(t, "wait", "pod/"+p.Name, "--for=delete", "--timeout="+flowTime)
}

func collectsPodsOfALostNode(t *testing.T) {
	p := idlePod(uniqueName("lost"))
	p.Spec.NodeName, p.Finalizers = uniqueName("node"), []string{held}
	require.NoError(t, cluster.Kube(t).Create(t.Context(), p))
	going(t, quarantine+collected, p)
	waited := p.DeletionTimestamp.Sub(p.CreationTimestamp.Time)
	require.GreaterOrEqual(t, waited, quarantine-time.Second, "a node may come back, and timestamps are of whole seconds")
	t.Logf("collected after %s, of which %s in quarantine", waited, quarantine)
	i := 0
	for ; i < len(p.Status.Conditions) && p.Status.Conditions[i].Type != corev1.DisruptionTarget; i++ {
	}
	require.Less(t, i, len(p.Status.Conditions), "conditions: %v", p.Status.Conditions)
	require.Equal(t, "DeletionByPodGC", p.Status.Conditions[i].Reason)
	release(t, p)
}

// A Pod that never had a node has no kubelet that could end its deletion.
func collectsPodsWithoutANode(t *testing.T) {
	p := idlePod(uniqueName("unscheduled"))
	p.Finalizers = []string{held}
	require.NoError(t, cluster.Kube(t).Create(t.Context(), p))
	kubectl(t, "delete", "pod", p.Name, "--wait=false")
	going(t, 2*checkInterval+settle, p)
	release(t, p)
}

func owning(o *corev1.ConfigMap) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: o.Name, UID: o.UID, BlockOwnerDeletion: ptr.To(true)}}
}

// collectsAfterARestart kills all collectors during a cascade. The next ones finish it.
func collectsAfterARestart(t *testing.T) {
	kube, label := cluster.Kube(t), uniqueName("restart")
	add := func(name string, owners ...metav1.OwnerReference) *corev1.ConfigMap {
		o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: cluster.Namespace, Name: label + "-" + name, OwnerReferences: owners, Labels: map[string]string{"e2e": label}}}
		require.NoError(t, kube.Create(t.Context(), o))
		return o
	}
	waiting, many := add("waiting"), add("many")
	blocker := add("blocker", owning(waiting)...)
	kubectl(t, "patch", "cm", blocker.Name, "--type=merge", "-p", `{"metadata":{"finalizers":["`+held+`"]}}`)
	for i := range 300 {
		add(fmt.Sprint(i), owning(many)...)
	}
	kubectl(t, "delete", "cm", waiting.Name, "--cascade=foreground", "--wait=false")
	explained(t, "cm/"+waiting.Name, "AwaitsDependents", "ConfigMap default/"+blocker.Name)
	require.NoError(t, kube.Delete(t.Context(), many))
	kill(t, "/gc")
	began := time.Now()
	t.Logf("%d of 300 dependents were left when all collectors were killed", len(named(t, "cm", "e2e="+label))-2)
	// The graph is built again, and has both: the deletion that waits, and the dependents of the other owner.
	explained(t, "cm/"+waiting.Name, "AwaitsDependents", "ConfigMap default/"+blocker.Name)
	require.True(t, eventually(collected, func() bool { return len(named(t, "cm", "e2e="+label)) == 2 }), "left: %v", named(t, "cm", "e2e="+label))
	t.Logf("all was collected %s after all collectors were killed", time.Since(began))
	require.Equal(t, 1, enforcing(t))
	kubectl(t, "patch", "cm", blocker.Name, "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
	noneLeft(t, "cm", "e2e="+label)
}
