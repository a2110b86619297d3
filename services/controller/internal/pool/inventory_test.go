package pool

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// TestLoad: a sandbox counts once, although resources, reports and reservations arrive independently.
func TestLoad(t *testing.T) {
	waits := func(uid types.UID) v1alpha1.Sandbox {
		return v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Name: string(uid), UID: uid}}
	}
	again := func(uid types.UID) v1alpha1.Sandbox { // after a reset, or the loss of its agent
		s := waits(uid)
		s.Status = v1alpha1.SandboxStatus{Phase: v1alpha1.PhasePending, Attempt: 1}
		return s
	}
	assigned := func(uid types.UID, agent string) v1alpha1.Sandbox {
		s := waits(uid)
		s.SetAssignment(&v1alpha1.Assignment{AgentUID: agent, SandboxUID: string(uid), Attempt: 1})
		return s
	}
	registry := func(agent string, allocated int32, reports ...string) agents.Agent {
		a := agents.Agent{Agent: &allocatorv1.Agent{Info: &agentv1.AgentInfo{PodUid: agent}, Allocated: allocated}}
		for _, uid := range reports {
			a.Sandboxes = append(a.Sandboxes, &agentv1.SandboxReport{Record: &agentv1.SandboxRecord{Fence: &agentv1.Fence{SandboxUid: uid, Attempt: 1}}})
		}
		return a
	}
	for name, c := range map[string]struct {
		resources []v1alpha1.Sandbox
		registry  []agents.Agent
		want      desired.Load
	}{
		"waiting":                      {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("a", 0)}, desired.Load{Pending: 1}},
		"waits, and has a reservation": {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("a", 1)}, desired.Load{Active: 1}},
		"waits, and is reported":       {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("a", 1, "u")}, desired.Load{Active: 1}},
		"waits again, and its last attempt is reported": {[]v1alpha1.Sandbox{again("u")}, []agents.Agent{registry("a", 1, "u")}, desired.Load{Active: 1, Pending: 1}},
		"waits, and is reported by a draining agent":    {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("drains", 1, "u")}, desired.Load{Pending: 1}},
		"waits beside another":                          {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("a", 1, "v")}, desired.Load{Active: 1, Pending: 1}},
		"two wait, one has a reservation":               {[]v1alpha1.Sandbox{waits("u"), waits("v")}, []agents.Agent{registry("a", 1)}, desired.Load{Active: 1, Pending: 1}},
		"a reservation on a draining agent":             {[]v1alpha1.Sandbox{waits("u")}, []agents.Agent{registry("drains", 1)}, desired.Load{Pending: 1}},
		"assigned, reserved and reported":               {[]v1alpha1.Sandbox{assigned("u", "a")}, []agents.Agent{registry("a", 1, "u")}, desired.Load{Active: 1}},
		"reserved, before its resource exists":          {nil, []agents.Agent{registry("a", 1)}, desired.Load{Active: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			i := &inventory{members: map[string]*member{
				"a":      {pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "a"}}},
				"drains": {pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "drains"}}, drain: v1alpha1.DrainOutdated},
			}}
			i.measure(c.resources, c.registry, newDrains(clock.RealClock{}))
			require.Equal(t, c.want, i.load)
		})
	}
}
