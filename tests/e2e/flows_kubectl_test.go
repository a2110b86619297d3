//go:build e2e

package e2e_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// TestFlowsByKubectl runs every flow of seed 002 with kubectl alone.
func TestFlowsByKubectl(t *testing.T) {
	pool := ownPool(t, "kflows", nil)
	t.Run("flows", func(t *testing.T) { // returns when all of them have ended, before the pool is deleted
		t.Run("create and delete", func(t *testing.T) { t.Parallel(); kubectlCreateDelete(t, pool) })
		t.Run("expire", func(t *testing.T) { t.Parallel(); kubectlExpire(t, pool) })
		t.Run("reset", func(t *testing.T) { t.Parallel(); kubectlReset(t, pool) })
		t.Run("exit 0", func(t *testing.T) { t.Parallel(); kubectlExit(t, pool, 0) })
		t.Run("exit 3", func(t *testing.T) { t.Parallel(); kubectlExit(t, pool, 3) })
		t.Run("update", func(t *testing.T) { t.Parallel(); kubectlUpdate(t, pool) })
		t.Run("agent loss", func(t *testing.T) { t.Parallel(); kubectlAgentLoss(t) })
		t.Run("pool", func(t *testing.T) { t.Parallel(); kubectlPool(t) })
	})
}

func kubectlCreateDelete(t *testing.T, pool string) {
	name := uniqueName("kcreate")
	apply(t, sandboxManifest(name, pool))
	waitFor(t, "sbx", name, ".status.phase", "Running")
	s := read(t, name)
	require.Contains(t, s.Finalizers, v1alpha1.Finalizer)
	require.Equal(t, agentOf(t, pool), s.Status.AssignedPod)
	require.NotEmpty(t, s.Status.SandboxID)
	require.Equal(t, metav1.ConditionTrue, conditionOf(s, v1alpha1.ConditionReady))
	kubectl(t, "delete", "sbx", name, "--timeout="+flowTime)
	gone(t, cluster.Namespace, name, s.EffectiveUID())
}

func kubectlExpire(t *testing.T, pool string) {
	s := sandboxManifest(uniqueName("kexpire"), pool)
	s.Spec.ExpireTime = &metav1.Time{Time: time.Now().Add(5 * time.Second)}
	apply(t, s)
	waitFor(t, "sbx", s.Name, ".status.phase", "Running")
	uid := read(t, s.Name).EffectiveUID()
	waitFor(t, "sbx", s.Name, ".status.phase", "Expired")
	require.Empty(t, field(t, s.Name, ".status.assignedPod"))
	emptied(t, uid)
	kubectl(t, "delete", "sbx", s.Name, "--timeout="+flowTime)
}

// nowMicro is `date -u +%FT%T.%6NZ`.
func nowMicro() string { return time.Now().UTC().Format("2006-01-02T15:04:05.000000Z") }

func kubectlReset(t *testing.T, pool string) {
	name := uniqueName("kreset")
	apply(t, sandboxManifest(name, pool))
	waitFor(t, "sbx", name, ".status.phase", "Running")
	before := read(t, name).Status.SandboxID
	revision := nowMicro()
	kubectl(t, "patch", "sbx", name, "--type=merge", "-p", `{"spec":{"resetRevision":"`+revision+`"}}`)
	waitFor(t, "sbx", name, ".status.acceptedResetRevision", revision)
	waitFor(t, "sbx", name, ".status.attempt", "2")
	waitFor(t, "sbx", name, ".status.phase", "Running")
	after := read(t, name)
	require.NotEqual(t, before, after.Status.SandboxID)
	require.True(t, eventually(settle, func() bool {
		_, err := nodeClient(t).LoadContainer(nodeContext(t.Context()), before)
		return err != nil
	}),
		"the container from before the reset still exists")
	kubectl(t, "delete", "sbx", name, "--timeout="+flowTime)
	gone(t, cluster.Namespace, name, after.EffectiveUID())
}

func kubectlExit(t *testing.T, pool string, code int) {
	s := sandboxManifest(uniqueName("kexit"), pool)
	s.Spec.Command = []string{"sh", "-c", "exit " + itoa(code)}
	apply(t, s)
	waitFor(t, "sbx", s.Name, ".status.exitCode", itoa(code))
	if code == 0 {
		waitFor(t, "sbx", s.Name, `.status.conditions[?(@.type=="Finished")].status`, "True")
		require.Equal(t, "Running", field(t, s.Name, ".status.phase"))
		require.Equal(t, "Completed", field(t, s.Name, ".status.reason"))
	} else {
		waitFor(t, "sbx", s.Name, ".status.phase", "Failed")
		require.Equal(t, "Error", field(t, s.Name, ".status.reason"))
	}
	uid := read(t, s.Name).EffectiveUID()
	kubectl(t, "delete", "sbx", s.Name, "--timeout="+flowTime)
	gone(t, cluster.Namespace, s.Name, uid)
}

func kubectlUpdate(t *testing.T, pool string) {
	name := uniqueName("kupdate")
	apply(t, sandboxManifest(name, pool))
	waitFor(t, "sbx", name, ".status.phase", "Running")
	patch := func(spec string) { kubectl(t, "patch", "sbx", name, "--type=merge", "-p", `{"spec":{`+spec+`}}`) }
	observed := func() { waitFor(t, "sbx", name, ".status.observedGeneration", field(t, name, ".metadata.generation")) }
	later := inTime(time.Hour)
	patch(`"expireTime":"` + later + `"`)
	require.Equal(t, later, field(t, name, ".spec.expireTime"))
	patch(`"expireTime":null`)
	require.Empty(t, field(t, name, ".spec.expireTime"))
	patch(`"failurePolicy":"AutoRecreate"`)
	kubectl(t, "label", "sbx", name, "team=red")
	require.Equal(t, "red", field(t, name, ".metadata.labels.team"))
	observed()
	require.Equal(t, "Running", field(t, name, ".status.phase"))
	require.Equal(t, "1", field(t, name, ".status.attempt"), "an update replaces no container")
	patch(`"expireTime":"` + inTime(2*time.Second) + `"`)
	waitFor(t, "sbx", name, ".status.phase", "Expired")
	kubectl(t, "delete", "sbx", name, "--timeout="+flowTime)
}

// kubectlAgentLoss kills the Pod of an agent with a sandbox of each failure policy.
func kubectlAgentLoss(t *testing.T) {
	pool := ownPool(t, "kloss", nil)
	auto, manual := sandboxManifest(uniqueName("kauto"), pool), sandboxManifest(uniqueName("kmanual"), pool)
	auto.Spec.FailurePolicy, auto.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To[int32](1)
	for _, s := range []*v1alpha1.Sandbox{auto, manual} {
		apply(t, s)
		waitFor(t, "sbx", s.Name, ".status.phase", "Running")
	}
	lost := read(t, manual.Name).Status.AssignedPod
	killAgentPod(t, pool)
	kubectl(t, "wait", "sbx/"+manual.Name, "--for=condition=AgentLost", "--timeout="+flowTime)
	waitFor(t, "sbx", auto.Name, ".status.attempt", "2")
	waitFor(t, "sbx", auto.Name, ".status.phase", "Running")
	s := read(t, manual.Name)
	require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase, "Manual keeps the phase")
	require.Equal(t, lost, s.Status.AssignedPod)
	require.EqualValues(t, 1, s.Status.Attempt)

	kubectl(t, "patch", "sbx", manual.Name, "--type=merge", "-p", `{"spec":{"resetRevision":"`+nowMicro()+`"}}`)
	waitFor(t, "sbx", manual.Name, ".status.attempt", "2")
	waitFor(t, "sbx", manual.Name, ".status.phase", "Running")
	kubectl(t, "wait", "sbx/"+manual.Name, "--for=condition=AgentLost=False", "--timeout="+flowTime)
	require.NotEqual(t, lost, field(t, manual.Name, ".status.assignedPod"))
}

// kubectlPool scales a pool, changes its template while a sandbox runs, and deletes it while the sandbox still runs.
func kubectlPool(t *testing.T) {
	pool := ownPool(t, "kpool", func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMax = 3 })
	kubectl(t, "scale", "sbp/"+pool, "--replicas=2")
	waitFor(t, "sbp", pool, ".status.readyAgents", "2")
	kubectl(t, "scale", "sbp/"+pool, "--replicas=1")
	require.True(t, eventually(3*time.Minute, func() bool { return kubectl(t, "get", "sbp", pool, "-o", "jsonpath={.status.currentAgents}") == "1" }),
		"the idle agent was not removed")

	s := sandboxManifest(uniqueName("kroll"), pool)
	apply(t, s)
	waitFor(t, "sbx", s.Name, ".status.phase", "Running")
	before := read(t, s.Name)
	process := taskPid(t, before.Status.SandboxID)
	kubectl(t, "patch", "sbp", pool, "--type=merge", "-p", `{"spec":{"agentTemplate":{"metadata":{"annotations":{"rolled":"yes"}}}}}`)
	fresh := func() string {
		return kubectl(t, "get", "pods", "-l", v1alpha1.LabelPool+"="+pool, "-o", `jsonpath={.items[?(@.metadata.annotations.rolled=="yes")].metadata.name}`)
	}
	require.True(t, eventually(time.Minute, func() bool { return fresh() != "" }), "no agent of the new template was started")
	kubectl(t, "wait", "pod", fresh(), "--for=condition=Ready", "--timeout="+flowTime)
	require.Equal(t, process, taskPid(t, before.Status.SandboxID), "the rollout restarted a running sandbox")
	require.Equal(t, before.Status.AssignedPod, field(t, s.Name, ".status.assignedPod"))

	kubectl(t, "delete", "sbp", pool, "--wait=false")
	require.NotEmpty(t, kubectl(t, "get", "sbp", pool, "-o", "jsonpath={.metadata.deletionTimestamp}"))
	require.Equal(t, process, taskPid(t, before.Status.SandboxID), "deleting the pool ended a running sandbox")
	kubectl(t, "delete", "sbx", s.Name, "--timeout="+flowTime)
	gone(t, cluster.Namespace, s.Name, before.EffectiveUID())
	kubectl(t, "wait", "sbp/"+pool, "--for=delete", "--timeout="+flowTime)
}
