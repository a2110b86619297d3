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
	// agentGoneLimit is how long after an agent's Pod the node may keep its containers.
	agentGoneLimit = 3 * time.Second
	// absentLimit is the janitor's grace and one of its scans, and a little for the work.
	absentLimit = 10*time.Second + time.Minute + 5*time.Second
	// replacedLimit is how long a container may stay after another Sandbox has got its name: less than the grace, for there is
	// nothing to wait for.
	replacedLimit = 5 * time.Second
)

// TestNodeJanitorRecovery is seed 000's: each row of its matrix is produced for real.
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
		require.True(t, eventually(settle, func() bool { return verdictOf(t, s) == "REASON_ASSIGNED" }), "a janitor keeps what is meant to run: %s", verdictOf(t, s))
	}

	// Behind the system's back: the controller would end what is deleted, and put the finalizer back.
	kubectl(t, "-n", "fast-sandbox-system", "scale", "deployment/controller", "--replicas=0")
	restore := sync.OnceFunc(func() { kubectl(t, "-n", "fast-sandbox-system", "scale", "deployment/controller", "--replicas=2") })
	defer restore()
	require.True(t, eventually(time.Minute, func() bool { return len(pidsOf(t, "/controller")) == 0 }))
	for _, s := range []*sandboxv1.Sandbox{absent, replaced} {
		kubectl(t, "patch", "sbx", s.GetName(), "--type=merge", "-p", `{"metadata":{"finalizers":null}}`)
		kubectl(t, "delete", "sbx", s.GetName(), "--timeout="+flowTime)
	}
	removed := time.Now()
	apply(t, sandboxManifest(replaced.GetName(), pool)) // nobody assigns it: it is in no janitor's cache
	began := time.Now()
	require.True(t, eventually(replacedLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), replaced.GetUid())) == 0 }),
		"another Sandbox has the name, and left: %v", leftovers(t.Context(), t, nodeClient(t), replaced.GetUid()))
	t.Logf("another Sandbox has the name: the container was gone after %s", time.Since(began))
	require.True(t, eventually(absentLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), absent.GetUid())) == 0 }), "the custom resource is absent")
	t.Logf("the custom resource is absent: the container was gone after %s", time.Since(removed))
	require.Equal(t, pid, taskPid(t, normal.GetStatus().GetSandboxId()), "normal work was disturbed")
	require.Equal(t, "REASON_ASSIGNED", verdictOf(t, normal))
	documented(t, normal.GetStatus().GetSandboxId(), replaced.GetStatus().GetSandboxId())
	restore()
	waitFor(t, "sbx", replaced.GetName(), ".status.phase", "Running")

	// The agent's Pod goes; its sandboxes' policy is to wait for somebody to reset them.
	agent := customResource(t, normal.GetName(), running).Status.AssignedPod
	kubectl(t, "delete", "pod", agent, "--grace-period=0", "--force", "--wait=false")
	kube := cluster.Kube(t)
	require.True(t, eventually(time.Minute, func() bool {
		return apierrors.IsNotFound(kube.Get(t.Context(), client.ObjectKey{Namespace: cluster.Namespace, Name: agent}, &corev1.Pod{}))
	}))
	began = time.Now()
	require.True(t, eventually(agentGoneLimit, func() bool { return len(leftovers(t.Context(), t, nodeClient(t), normal.GetUid())) == 0 }),
		"the agent's Pod is gone, and left: %v", leftovers(t.Context(), t, nodeClient(t), normal.GetUid()))
	t.Logf("the agent's Pod is gone: its container was gone after %s", time.Since(began))
	require.True(t, eventually(settle, func() bool {
		return strings.Contains(kubectl(t, "get", "events", "--field-selector=involvedObject.name="+normal.GetName()), "OrphanRemoved")
	}), "nobody told of it")
}

// documented runs the commands of README.md and deploy/README.md while one container is kept and another was removed.
func documented(t *testing.T, kept, removed string) {
	t.Helper()
	node := strings.TrimSpace(kubectl(t, "get", "nodes", "-o", "jsonpath={.items[0].metadata.name}"))
	require.Contains(t, fsbctl(t, "janitor", "verdicts"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "verdicts", "--action", "delete,wait", "-o", "wide"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "sweep", "--dry-run"), kept)
	require.NotContains(t, fsbctl(t, "janitor", "sweep", "--node", node), kept)
	require.Contains(t, fsbctl(t, "janitor", "verdicts", "--node", node), kept, "a sweep takes no more than the janitor would")
	watch := cluster.Exec(t, "timeout", "3", cluster.Binary(t, "fsb-ctl"), "janitor", "verdicts", "--node", node, "-w")
	require.Equal(t, 124, watch.Code, "a watch goes on: %s", watch.Stderr)
	require.Contains(t, watch.Stdout, kept)
	var told string
	require.True(t, eventually(settle, func() bool {
		told = kubectl(t, "get", "events", "-A", "--field-selector", "reason=OrphanRemoved")
		return strings.Contains(told, removed)
	}), "%s", told)
	require.Regexp(t, removed+".*another Sandbox has its name", told)
}

// verdictOf is what the node's janitor says of a sandbox's container, by fsb-ctl.
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
