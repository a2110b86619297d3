//go:build e2e

package e2e_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/cluster"
)

// view is the output of `fsb-ctl get -o json`.
type view struct {
	UID    string
	Labels map[string]string
	Spec   struct{ ExpireTime, FailurePolicy string }
	Status struct {
		Phase, AssignedPod, SandboxID, Reason, AcceptedResetRevision string
		Attempt                                                      string
		ExitCode                                                     *int
		Conditions                                                   []metav1.Condition
	}
}

func (v view) condition(kind string) metav1.ConditionStatus {
	for _, c := range v.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return metav1.ConditionUnknown
}

func fsbctl(t *testing.T, args ...string) string {
	t.Helper()
	return cluster.OK(t, "fsb-ctl", args...)
}

// see reads a sandbox with fsb-ctl.
func see(t *testing.T, name string) view {
	t.Helper()
	var v view
	require.NoError(t, json.Unmarshal([]byte(fsbctl(t, "get", name, "-o", "json")), &v))
	return v
}

// seen waits until the output of fsb-ctl meets the condition.
func seen(t *testing.T, name, what string, condition func(view) bool) view {
	t.Helper()
	var last view
	require.True(t, eventually(time.Minute, func() bool {
		last = see(t, name)
		return condition(last)
	}), "sandbox %s never was %s: %+v", name, what, last)
	return last
}

func phase(p string) func(view) bool {
	return func(v view) bool { return v.Status.Phase == "PHASE_"+p }
}

// launch starts a sandbox in the pool.
func launch(t *testing.T, name, pool string, args ...string) {
	t.Helper()
	args = append([]string{"run", name, "--image", cluster.Busybox, "--pool", pool}, args...)
	fsbctl(t, append(args, "--", "sh", "-c", runOn)...)
}

// TestFlowsByFsbCtl runs every flow of seed 002 with fsb-ctl alone. Only agents are created and killed with kubectl:
// pools are Kubernetes objects, and the loss of a Pod is an accident.
func TestFlowsByFsbCtl(t *testing.T) {
	pool := ownPool(t, "fflows", nil)
	t.Run("flows", func(t *testing.T) {
		t.Run("create and delete", func(t *testing.T) { t.Parallel(); fsbctlCreateDelete(t, pool) })
		t.Run("expire", func(t *testing.T) { t.Parallel(); fsbctlExpire(t, pool) })
		t.Run("reset", func(t *testing.T) { t.Parallel(); fsbctlReset(t, pool) })
		t.Run("exit 0", func(t *testing.T) { t.Parallel(); fsbctlExit(t, pool, 0) })
		t.Run("exit 3", func(t *testing.T) { t.Parallel(); fsbctlExit(t, pool, 3) })
		t.Run("update", func(t *testing.T) { t.Parallel(); fsbctlUpdate(t, pool) })
		t.Run("fast and strong", func(t *testing.T) { t.Parallel(); fsbctlModes(t, pool) })
		t.Run("agent loss", func(t *testing.T) { t.Parallel(); fsbctlAgentLoss(t) })
	})
}

func fsbctlCreateDelete(t *testing.T, pool string) {
	name := uniqueName("fcreate")
	launch(t, name, pool)
	v := seen(t, name, "running", phase("RUNNING"))
	require.Contains(t, fsbctl(t, "list", "--pool", pool), name)
	require.Contains(t, fsbctl(t, "describe", name), v.Status.AssignedPod)
	fsbctl(t, "delete", name)
	require.Equal(t, 3, cluster.Run(t, "", "fsb-ctl", "get", name).Code, "not found")
	gone(t, cluster.Namespace, name, v.UID)
}

func fsbctlExpire(t *testing.T, pool string) {
	name := uniqueName("fexpire")
	launch(t, name, pool, "--ttl", "3s")
	v := seen(t, name, "expired", phase("EXPIRED"))
	require.Empty(t, v.Status.AssignedPod)
	emptied(t, v.UID)
	fsbctl(t, "delete", name)
	gone(t, cluster.Namespace, name, v.UID)
}

func fsbctlReset(t *testing.T, pool string) {
	name := uniqueName("freset")
	launch(t, name, pool)
	before := seen(t, name, "running", phase("RUNNING"))
	fsbctl(t, "update", name, "--reset")
	after := seen(t, name, "reset", func(v view) bool {
		return v.Status.Attempt == "2" && phase("RUNNING")(v) && v.Status.AcceptedResetRevision != ""
	})
	require.NotEqual(t, before.Status.SandboxID, after.Status.SandboxID)
	require.Equal(t, before.UID, after.UID)
	fsbctl(t, "delete", name)
	gone(t, cluster.Namespace, name, after.UID)
}

func fsbctlExit(t *testing.T, pool string, code int) {
	name := uniqueName("fexit")
	fsbctl(t, "run", name, "--image", cluster.Busybox, "--pool", pool, "--", "sh", "-c", "sleep 0.2; exit "+itoa(code))
	v := seen(t, name, "ended", func(v view) bool { return v.Status.ExitCode != nil })
	require.Equal(t, code, *v.Status.ExitCode)
	if code == 0 {
		v = seen(t, name, "finished", func(v view) bool { return v.condition(v1alpha1.ConditionFinished) == metav1.ConditionTrue })
		require.Equal(t, "PHASE_RUNNING", v.Status.Phase)
		require.Equal(t, "Completed", v.Status.Reason)
	} else {
		v = seen(t, name, "failed", phase("FAILED"))
		require.Equal(t, "Error", v.Status.Reason)
	}
	fsbctl(t, "delete", name)
	gone(t, cluster.Namespace, name, v.UID)
}

func fsbctlUpdate(t *testing.T, pool string) {
	name := uniqueName("fupdate")
	launch(t, name, pool)
	fsbctl(t, "update", name, "--ttl", "1h")
	require.NotEmpty(t, see(t, name).Spec.ExpireTime)
	later := inTime(2 * time.Hour)
	fsbctl(t, "update", name, "--expire", later)
	require.Equal(t, later, see(t, name).Spec.ExpireTime)
	fsbctl(t, "update", name, "--no-expire")
	require.Empty(t, see(t, name).Spec.ExpireTime)
	fsbctl(t, "update", name, "--failure-policy", "auto-recreate", "--label", "team=red", "--label", "tier=1")
	v := see(t, name)
	require.Equal(t, "FAILURE_POLICY_AUTO_RECREATE", v.Spec.FailurePolicy)
	require.Equal(t, "red", v.Labels["team"])
	fsbctl(t, "update", name, "--label", "team-")
	v = see(t, name)
	require.NotContains(t, v.Labels, "team")
	require.Equal(t, "1", v.Labels["tier"])
	require.Equal(t, "1", seen(t, name, "running", phase("RUNNING")).Status.Attempt, "an update replaces no container")
	fsbctl(t, "update", name, "--ttl", "1s")
	seen(t, name, "expired", phase("EXPIRED"))
	fsbctl(t, "delete", name)
}

// fsbctlModes checks that both modes reach the same custom resource, except for each sandbox's own values and the messages
// about how it was scheduled.
func fsbctlModes(t *testing.T, pool string) {
	fast, strong := uniqueName("ffast"), uniqueName("fstrong")
	launch(t, fast, pool, "--port", "8111", "--label", "a=b", "--ttl", "1h")
	launch(t, strong, pool, "--port", "8112", "--label", "a=b", "--ttl", "1h", "--strong")
	normal := func(name string) *v1alpha1.Sandbox {
		s := customResource(t, name, func(s *v1alpha1.Sandbox) bool {
			return running(s) && s.Status.ObservedGeneration == s.Generation && s.Status.StartTime != nil
		}).DeepCopy()
		require.Len(t, s.Status.Endpoints, 1)
		a, err := s.Assignment()
		require.NoError(t, err)
		require.Equal(t, s.EffectiveUID(), a.SandboxUID)
		require.True(t, identity.IsSlotID(s.Status.SandboxID) || s.Status.SandboxID == s.EffectiveUID()+"-1", s.Status.SandboxID)
		kept := map[string]string{}
		for key := range s.Annotations {
			kept[key] = "set"
		}
		// The allocator chooses the uid of the fast one; the strong one may have that of the API server.
		for _, key := range []string{v1alpha1.AnnotationSandboxUID, v1alpha1.AnnotationCreateTime} {
			delete(kept, key)
		}
		s.ObjectMeta = metav1.ObjectMeta{Labels: s.Labels, Annotations: kept, Finalizers: s.Finalizers}
		s.Spec.ConsistencyMode, s.Spec.ExpireTime, s.Spec.ExposedPorts = "", nil, nil
		s.Status.SandboxID, s.Status.StartPath, s.Status.Endpoints, s.Status.StartTime, s.Status.ObservedGeneration = "", "", nil, nil, 0
		for i := range s.Status.Conditions {
			c := &s.Status.Conditions[i]
			c.LastTransitionTime, c.ObservedGeneration, c.Reason, c.Message = metav1.Time{}, 0, "", ""
		}
		return s
	}
	require.Equal(t, normal(fast), normal(strong))
	fsbctl(t, "delete", fast, strong)
}

func fsbctlAgentLoss(t *testing.T) {
	pool := ownPool(t, "floss", nil)
	auto, manual := uniqueName("fauto"), uniqueName("fmanual")
	launch(t, auto, pool, "--failure-policy", "auto-recreate")
	fsbctl(t, "update", auto, "--recovery-timeout", "1s")
	launch(t, manual, pool)
	lost := seen(t, manual, "running", phase("RUNNING")).Status.AssignedPod
	customResource(t, manual, running)
	killAgentPod(t, pool)
	v := seen(t, manual, "lost", func(v view) bool { return v.condition(v1alpha1.ConditionAgentLost) == metav1.ConditionTrue })
	require.Equal(t, "PHASE_RUNNING", v.Status.Phase, "manual keeps the phase")
	require.Equal(t, lost, v.Status.AssignedPod)
	seen(t, auto, "recreated", func(v view) bool { return v.Status.Attempt == "2" && phase("RUNNING")(v) })
	fsbctl(t, "update", manual, "--reset")
	v = seen(t, manual, "reset", func(v view) bool {
		return v.Status.Attempt == "2" && phase("RUNNING")(v) && v.condition(v1alpha1.ConditionAgentLost) != metav1.ConditionTrue
	})
	require.NotEqual(t, lost, v.Status.AssignedPod)
	fsbctl(t, "delete", auto, manual)
}
