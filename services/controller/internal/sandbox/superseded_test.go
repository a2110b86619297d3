package sandbox

import (
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// TestDeletionRemovesSupersededAttempts: the container of the sandbox itself is removed, and an earlier attempt of its create may
// have left one on agent-2.
func TestDeletionRemovesSupersededAttempts(t *testing.T) {
	earlier := identity.Fence{SandboxUID: "earlier", Attempt: 1, AgentUID: "agent-uid-2"}
	superseded := func(s *v1alpha1.Sandbox) {
		a := assigned
		a.Superseded = []v1alpha1.Superseded{{AgentPod: "agent-2", AgentUID: "agent-uid-2", SandboxUID: "earlier", Attempt: 1}}
		s.SetAssignment(&a)
	}
	reported := func(s agentv1.SandboxState, sandboxName string) *agentv1.SandboxReport {
		return &agentv1.SandboxReport{State: s, Record: &agentv1.SandboxRecord{
			Namespace: name.Namespace, Name: sandboxName, Fence: &agentv1.Fence{SandboxUid: "earlier", Attempt: 1, AgentUid: "agent-uid-2"},
		}}
	}
	snapshot := func(r ...*agentv1.SandboxReport) *agentv1.AgentSnapshot { return &agentv1.AgentSnapshot{Sandboxes: r} }
	tests := map[string]struct {
		noPod    bool
		status   agents.Status
		report   *agentv1.SandboxReport
		snapshot *agentv1.AgentSnapshot // nil: the agent does not answer
		done     bool
		calls    bool
		blocked  string
	}{
		"its agent's Pod does not exist":                {noPod: true, status: agents.Absent, done: true},
		"its agent reports no such container":           {status: agents.Ready, done: true},
		"its agent is silent":                           {status: agents.Silent, blocked: reasonUnreachable},
		"its agent drains, and has no such container":   {status: agents.NotReady, snapshot: snapshot(), done: true},
		"its agent drains, and runs its container":      {status: agents.NotReady, snapshot: snapshot(reported(agentv1.SandboxState_SANDBOX_STATE_RUNNING, name.Name)), calls: true},
		"its agent drains, and has another's container": {status: agents.NotReady, snapshot: snapshot(reported(agentv1.SandboxState_SANDBOX_STATE_RUNNING, "another")), done: true},
		"its agent drains, and does not answer":         {status: agents.NotReady, blocked: reasonUnreachable},
		"its agent is not connected":                    {status: agents.Absent, blocked: reasonUnreachable},
		"the Registry cannot be read":                   {status: agents.Unknown, blocked: reasonUnreachable},
		"its container runs":                            {status: agents.Ready, report: reported(agentv1.SandboxState_SANDBOX_STATE_RUNNING, name.Name), calls: true},
		"its container has ended":                       {status: agents.Ready, report: reported(agentv1.SandboxState_SANDBOX_STATE_STOPPED, name.Name), calls: true},
		"its container is removed":                      {status: agents.Silent, report: reported(agentv1.SandboxState_SANDBOX_STATE_TERMINATED, name.Name), done: true},
		"the annotation names another sandbox's":        {status: agents.Ready, report: reported(agentv1.SandboxState_SANDBOX_STATE_RUNNING, "another"), done: true},
		"its container runs, and its agent went silent": {status: agents.Silent, report: reported(agentv1.SandboxState_SANDBOX_STATE_RUNNING, name.Name), calls: true},
	}
	for title, tt := range tests {
		t.Run(title, func(t *testing.T) {
			f := newFixture(t)
			if !tt.noPod {
				require.NoError(t, f.client.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: "agent-2", UID: "agent-uid-2"}}))
			}
			f.registry.statuses["agent-uid-2"] = tt.status
			if tt.report != nil {
				f.registry.reports[earlier] = tt.report
			}
			if f.agents.fresh = tt.snapshot; tt.snapshot == nil {
				f.agents.snapshotErr = failure(errdefs.ErrUnavailable, fault.AgentUnavailable)
			}
			f.agents.service.deleted = removedResponse()
			r := f.remover()
			p, err := r.remove(t.Context(), targetOf(t, newSandbox(superseded, inPhase(v1alpha1.PhaseTerminating), deleted)), lifecycle.DeleteRequested)
			require.NoError(t, err)
			require.Equal(t, tt.done, p.done)
			require.Equal(t, tt.done, p.next == lifecycle.AgentTerminated)
			if tt.calls {
				require.Eventually(t, func() bool { call, ok := r.deletes.get(name, earlier); return ok && !call.running }, testkit.Timeout, testkit.Tick)
			}
			if !tt.done {
				require.Equal(t, timing.DeletionPoll, p.requeue)
			}
			if tt.blocked != "" {
				require.Equal(t, tt.blocked, p.blocked.reason)
				require.Contains(t, p.blocked.message, "agent-2")
			}
			require.Len(t, f.agents.service.deleteRequests(), map[bool]int{true: 1}[tt.calls])
		})
	}
}
