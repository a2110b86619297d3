//go:build e2e

package e2e_test

import (
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

const (
	// agentGoneLimit is how long the node may keep containers after their agent's Pod was deleted.
	agentGoneLimit = 3 * time.Second
	// absentLimit is the janitor's grace and scan interval by default, and some time for the deletion.
	absentLimit = 10*time.Second + time.Minute + 5*time.Second
	// replacedLimit is how long a container may stay after another Sandbox has its name: less than the grace, which does not
	// apply.
	replacedLimit = 5 * time.Second
)

// TestNodeJanitorRecovery produces each row of the matrix of seed 000.
func TestNodeJanitorRecovery(t *testing.T) {
	pool := ownPool(t, "recovery", nil)
	c := sandboxes(t)
	in := func(prefix string) *sandboxv1.Sandbox {
		req := sleeper(uniqueName(prefix))
		req.Spec.Pool = pool
		resp := create(t, c, req)
		customResource(t, req.GetName(), running)
		return resp.GetSandbox()
	}
	normal, absent, replaced := in("normal"), in("absent"), in("replaced")
	pid := taskPid(t, normal.GetStatus().GetSandboxId())
	for _, s := range []*sandboxv1.Sandbox{normal, absent, replaced} {
		require.True(t, eventually(settle, func() bool { return verdictOf(t, s) == "REASON_ASSIGNED" }), "the janitor must keep an assigned container: %s", verdictOf(t, s))
	}

	// Without the controller, which would delete the containers itself and add the finalizer again.
	kubectl(t, "-n", "fast-sandbox-system", "scale", "deployment/controller", "--replicas=0")
	restore := sync.OnceFunc(func() { kubectl(t, "-n", "fast-sandbox-system", "scale", "deployment/controller", "--replicas=2") })
	defer restore()
	require.True(t, eventually(time.Minute, func() bool { return len(pidsOf(t, "/controller")) == 0 }))
	for _, s := range []*sandboxv1.Sandbox{absent, replaced} {
		kubectl(t, "patch", "sbx", s.GetName(), "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		kubectl(t, "delete", "sbx", s.GetName(), "--timeout="+flowTime)
	}
	removed := time.Now()
	apply(t, sandboxManifest(replaced.GetName(), pool)) // no controller assigns it: it is in no janitor's cache
	began := time.Now()
	require.True(t, eventually(replacedLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), replaced.GetUid())) == 0 }),
		"another Sandbox has the name, and left: %v", leftovers(t.Context(), t, nodeClient(t), replaced.GetUid()))
	t.Logf("another Sandbox has the name: the container was deleted after %s", time.Since(began))
	require.True(t, eventually(absentLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), absent.GetUid())) == 0 }), "the custom resource is absent")
	t.Logf("the custom resource is absent: the container was deleted after %s", time.Since(removed))
	require.Equal(t, pid, taskPid(t, normal.GetStatus().GetSandboxId()), "normal work was disturbed")
	require.Equal(t, "REASON_ASSIGNED", verdictOf(t, normal))
	documented(t, normal.GetStatus().GetSandboxId(), replaced.GetStatus().GetSandboxId())
	restore()
	waitFor(t, "sbx", replaced.GetName(), ".status.phase", "Running")

	// The agent's Pod is deleted; the policy of its sandboxes is to wait for a reset.
	agent := customResource(t, normal.GetName(), running).Status.AssignedPod
	kubectl(t, "delete", "pod", agent, "--grace-period=0", "--force", "--wait=false")
	kube := cluster.Kube(t)
	require.True(t, eventually(time.Minute, func() bool {
		return apierrors.IsNotFound(kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: agent}, &corev1.Pod{}))
	}))
	began = time.Now()
	require.True(t, eventually(agentGoneLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), normal.GetUid())) == 0 }),
		"the agent's Pod is gone, and left: %v", leftovers(t.Context(), t, nodeClient(t), normal.GetUid()))
	t.Logf("the agent's Pod is gone: its container was deleted after %s", time.Since(began))
	require.True(t, eventually(settle, func() bool {
		return strings.Contains(kubectl(t, "get", "events", "--field-selector=involvedObject.name="+normal.GetName()), "OrphanRemoved")
	}), "no event reports it")
}

// documented runs the commands of README.md and deploy/README.md after one container was kept and another was removed.
func documented(t *testing.T, kept, removed string) {
	t.Helper()
	node := strings.TrimSpace(kubectl(t, "get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"))
	require.Contains(t, fsbctl(t, "janitor", "verdicts"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "verdicts", "--action", "delete,wait", "-o", "wide"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "sweep", "--dry-run"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "sweep", "--node", node), kept)
	require.Contains(t, fsbctl(t, "janitor", "verdicts", "--node", node), kept, "a sweep deletes no more than the janitor would")
	watch := cluster.Exec(t, "timeout", "3", cluster.Binary(t, "fsb-ctl"), "janitor", "verdicts", "--node", node, "-w")
	require.Equal(t, 124, watch.Code, "a watch continues: %s", watch.Stderr)
	require.Contains(t, watch.Stdout, kept)
	var events string
	require.True(t, eventually(settle, func() bool {
		events = kubectl(t, "get", "events", "-A", "--field-selector", "reason=OrphanRemoved")
		return strings.Contains(events, removed)
	}), "%s", events)
	require.Regexp(t, removed+".*another Sandbox has its name", events)
}

// verdictOf returns the janitor's verdict on a sandbox's container, read with fsb-ctl.
func verdictOf(t *testing.T, s *sandboxv1.Sandbox) string {
	t.Helper()
	var out struct {
		Verdicts []struct {
			ContainerID string `json:"containerId"`
			Reason      string `json:"reason"`
		} `json:"verdicts"`
	}
	require.NoError(t, json.Unmarshal([]byte(cluster.OK(t, "fsb-ctl", "janitor", "verdicts", "-o", "json")), &out))
	for _, v := range out.Verdicts {
		if v.ContainerID == s.GetStatus().GetSandboxId() {
			return v.Reason
		}
	}
	return ""
}
