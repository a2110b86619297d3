package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

func (f *fixture) observer() *observer {
	return &observer{loss: f.lossDetector(), reports: f.reportObserver(), memory: f.memory, timing: timing}
}

func (f *fixture) lossDetector() *lossDetector {
	return &lossDetector{agents: f.access(), memory: f.memory, timing: timing, heartbeatTimeout: func() time.Duration { return 10 * time.Second }}
}

func (f *fixture) reportObserver() *reportObserver {
	return &reportObserver{agents: f.access(), memory: f.memory, timing: timing,
		creates: &createObserver{calls: f.calls(), memory: f.memory, timing: timing, events: eventWriter{f.recorder}}}
}

func expiring(d time.Duration) change {
	return func(s *v1alpha1.Sandbox) { s.Spec.ExpireTime = &metav1.Time{Time: start.Add(d)} }
}

func resetAt(d time.Duration) change {
	return func(s *v1alpha1.Sandbox) { s.Spec.ResetRevision = &metav1.MicroTime{Time: start.Add(d)} }
}

func removing(s *v1alpha1.Sandbox) { s.Status.Reason = reasonExpiring }

// TestMostImportantEvent: a deletion comes first, then an acknowledged create, the clock, a reset, a lost agent, and the report.
func TestMostImportantEvent(t *testing.T) {
	started := func(s *v1alpha1.Sandbox) {
		a := assigned
		a.Started = &v1alpha1.Started{SandboxID: "c", StartTime: metav1.NewMicroTime(start)}
		s.SetAssignment(&a)
	}
	running := []change{onAgent, inPhase(v1alpha1.PhaseRunning)}
	with := func(base []change, more ...change) []change { return append(append([]change(nil), base...), more...) }
	wasLost := withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable")
	for _, tt := range []struct {
		name    string
		changes []change
		silent  bool
		want    lifecycle.Event
		requeue time.Duration
	}{
		{"deleted", with(running, deleted, expiring(-1), resetAt(0)), true, lifecycle.DeleteRequested, 0},
		{"acknowledged, and its agent is lost", []change{onFastPath, started}, true, lifecycle.AgentRunning, 0},
		{"expired", with(running, expiring(0), resetAt(0)), true, lifecycle.ExpireTimePassed, after(timing.Requeue)},
		{"reset", with(running, resetAt(0)), false, lifecycle.ResetRequested, 0},
		{"reset of a lost sandbox", with(running, resetAt(0)), true, lifecycle.ResetWhileLost, after(timing.Requeue)},
		{"new", nil, false, lifecycle.Accepted, 0},
		{"waiting", []change{inPhase(v1alpha1.PhasePending)}, false, lifecycle.Unassigned, 0},
		{"the phase implies an assignment", []change{inPhase(v1alpha1.PhaseBound)}, false, lifecycle.Unassigned, 0},
		{"failed", []change{inPhase(v1alpha1.PhaseFailed)}, false, 0, 0},
		{"expired before", []change{inPhase(v1alpha1.PhaseExpired), expiring(-time.Hour)}, false, 0, 0},
		{"finished", []change{finishedSandbox}, false, 0, 0},
		{"failed to be created", []change{onAgent, inPhase(v1alpha1.PhaseFailed)}, true, lifecycle.AgentFailed, after(timing.Requeue)},
		{"lost", with(running), true, lifecycle.AgentLost, after(timing.Requeue)},
		{"lost before it ran", []change{onAgent, inPhase(v1alpha1.PhaseBound)}, true, lifecycle.AgentRefused, after(timing.Requeue)},
		{"lost, and to be recreated at once", with(running, wasLost, func(s *v1alpha1.Sandbox) {
			s.Spec.FailurePolicy, s.Spec.RecoveryTimeoutSeconds = v1alpha1.FailurePolicyAutoRecreate, ptr.To(int32(0))
		}), true, lifecycle.RecoveryTimeoutOver, after(timing.Requeue)},
		{"reported", with(running), false, lifecycle.AgentRunning, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			f.registry.reports[fence] = report(agentv1.SandboxState_SANDBOX_STATE_RUNNING)
			if tt.silent {
				f.registry.statuses["agent-uid"] = agents.Silent
				f.agents.snapshotErr = errUnreachable
			}
			seen, err := f.observer().observe(t.Context(), targetOf(t, newSandbox(tt.changes...)))
			require.NoError(t, err)
			require.Equal(t, tt.want, seen.event, "%s", seen.event)
			require.Equal(t, tt.requeue, seen.requeue)
		})
	}
}

func TestAcknowledgedSandboxHasItsReport(t *testing.T) {
	x := targetOf(t, newSandbox(onFastPath, func(s *v1alpha1.Sandbox) {
		a := assigned
		a.Started = &v1alpha1.Started{SandboxID: "c", StartTime: metav1.NewMicroTime(start), StartPath: v1alpha1.StartPathSlot, Endpoints: []string{"1.2.3.4:80"}}
		s.SetAssignment(&a)
	}))
	require.True(t, acknowledged(x))
	st := x.sandbox.Status
	require.Equal(t, "c", st.SandboxID)
	require.Equal(t, []string{"1.2.3.4:80"}, st.Endpoints)
	require.Equal(t, v1alpha1.StartPathSlot, st.StartPath)
	require.True(t, st.StartTime.Time.Equal(start))
	x.sandbox.Status.Phase = v1alpha1.PhaseRunning
	require.False(t, acknowledged(x), "once")
}

func TestExpiry(t *testing.T) {
	for _, tt := range []struct {
		name    string
		changes []change
		event   lifecycle.Event
		requeue time.Duration
	}{
		{"never", []change{onAgent}, 0, 0},
		{"far away: shortly before", []change{onAgent, expiring(time.Minute)}, 0, 30 * time.Second},
		{"near: exactly then", []change{onAgent, expiring(10 * time.Second)}, 0, 10 * time.Second},
		{"now", []change{onAgent, expiring(0)}, lifecycle.ExpireTimePassed, 0},
		{"waiting", []change{inPhase(v1alpha1.PhasePending), expiring(-1)}, lifecycle.ExpireTimePassed, 0},
		{"expired", []change{inPhase(v1alpha1.PhaseExpired), expiring(-1)}, 0, 0},
		{"failed", []change{inPhase(v1alpha1.PhaseFailed), expiring(-1)}, 0, 0},
		{"failed, with a container", []change{inPhase(v1alpha1.PhaseFailed), onAgent, expiring(-1)}, lifecycle.ExpireTimePassed, 0},
		{"changed after the removal has started", []change{onAgent, removing, expiring(time.Hour)}, lifecycle.ExpireTimePassed, 0},
		{"unset after the removal has started", []change{onAgent, removing}, lifecycle.ExpireTimePassed, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			event, requeue := (&observer{timing: timing}).expiry(targetOf(t, newSandbox(tt.changes...)))
			require.Equal(t, tt.event, event)
			require.Equal(t, tt.requeue, requeue)
		})
	}
}

// TestRecoveryTimeout counts from the transition of the condition, whichever process has set it.
func TestRecoveryTimeout(t *testing.T) {
	since := func(d time.Duration) change {
		return func(s *v1alpha1.Sandbox) {
			s.Status.Conditions = []metav1.Condition{{Type: v1alpha1.ConditionAgentLost, Status: yes, LastTransitionTime: metav1.NewTime(start.Add(-d))}}
		}
	}
	recreate := func(s *v1alpha1.Sandbox) { s.Spec.FailurePolicy = v1alpha1.FailurePolicyAutoRecreate }
	seconds := func(n int32) change {
		return func(s *v1alpha1.Sandbox) { s.Spec.RecoveryTimeoutSeconds = ptr.To(n) }
	}
	for _, tt := range []struct {
		name    string
		changes []change
		event   lifecycle.Event
		requeue time.Duration
	}{
		{"manual", []change{since(time.Hour)}, lifecycle.AgentLost, timing.Requeue},
		{"not marked yet", []change{recreate}, lifecycle.AgentLost, timing.Requeue},
		{"default", []change{recreate, since(29 * time.Second)}, lifecycle.AgentLost, time.Second},
		{"over", []change{recreate, since(30 * time.Second)}, lifecycle.RecoveryTimeoutOver, 0},
		{"own", []change{recreate, seconds(60), since(30 * time.Second)}, lifecycle.AgentLost, timing.Requeue},
		{"own, over", []change{recreate, seconds(60), since(time.Minute)}, lifecycle.RecoveryTimeoutOver, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			seen := f.observer().lost(targetOf(t, newSandbox(append([]change{onAgent, inPhase(v1alpha1.PhaseRunning)}, tt.changes...)...)))
			require.Equal(t, tt.event, seen.event)
			require.Equal(t, tt.requeue, seen.requeue)
		})
	}
}

func TestLostAgentIsExcluded(t *testing.T) {
	f := newFixture(t)
	seen := f.observer().lost(targetOf(t, newSandbox(onAgent, inPhase(v1alpha1.PhaseBound))))
	require.Equal(t, lifecycle.AgentRefused, seen.event)
	require.Equal(t, []string{"agent-uid"}, f.memory.excluded(name))
}

func TestDetectLoss(t *testing.T) {
	running := []change{onAgent, inPhase(v1alpha1.PhaseRunning)}
	lostBefore := append([]change{withCondition(v1alpha1.ConditionAgentLost, yes, "AgentUnavailable")}, running...)
	for _, tt := range []struct {
		name      string
		changes   []change
		status    agents.Status
		answers   bool
		podExists bool
		silence   time.Duration
		lost      bool
		requeue   time.Duration
	}{
		{name: "not assigned", changes: nil, status: agents.Absent},
		{name: "finished", changes: []change{onAgent, finishedSandbox}, status: agents.Absent},
		{name: "the Registry is unknown", changes: running, status: agents.Unknown},
		{name: "the Registry is unknown, lost before", changes: lostBefore, status: agents.Unknown, lost: true},
		{name: "ready", changes: lostBefore, status: agents.Ready},
		{name: "removed Pod", changes: running, status: agents.Absent, lost: true},
		{name: "absent, but the Pod exists and answers", changes: running, status: agents.Absent, podExists: true, answers: true, requeue: timing.Requeue},
		{name: "absent, the Pod exists and is silent", changes: running, status: agents.Absent, podExists: true, requeue: timing.Requeue},
		{name: "silent but answers", changes: lostBefore, status: agents.Silent, answers: true, requeue: timing.Requeue},
		{name: "silent", changes: running, status: agents.Silent, lost: true, requeue: timing.Requeue},
		{name: "not ready, silent for a moment", changes: running, status: agents.NotReady, silence: 10 * time.Second, requeue: timing.Requeue},
		{name: "not ready, silent for long", changes: running, status: agents.NotReady, silence: 11 * time.Second, lost: true, requeue: timing.Requeue},
		{name: "still lost", changes: lostBefore, status: agents.NotReady, lost: true, requeue: timing.Requeue},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t)
			if tt.podExists {
				require.NoError(t, f.client.Create(t.Context(), agentPod()))
			}
			f.registry.statuses["agent-uid"] = tt.status
			if !tt.answers {
				f.agents.snapshotErr = errUnreachable
			}
			f.memory.agentSilent(name)
			f.clock.Step(tt.silence)
			lost, requeue, err := f.lossDetector().detect(t.Context(), targetOf(t, newSandbox(tt.changes...)))
			require.NoError(t, err)
			require.Equal(t, tt.lost, lost)
			require.Equal(t, tt.requeue, requeue)
			if tt.answers || tt.status == agents.Ready {
				require.Zero(t, f.memory.agentSilent(name), "the silence has ended")
			}
		})
	}
}

func TestPodGoneComparesTheUID(t *testing.T) {
	pod := agentPod()
	pod.UID = "another"
	f := newFixture(t, pod)
	gone, err := f.access().podGone(t.Context(), "ns", assigned)
	require.NoError(t, err)
	require.True(t, gone)
}

// TestAddress: users can write any address into an assignment, and name any agent.
func TestAddress(t *testing.T) {
	f := newFixture(t, agentPod())
	a := f.access()
	address := func(namespace string, change func(*v1alpha1.Assignment)) string {
		x := assigned
		if change != nil {
			change(&x)
		}
		return a.address(t.Context(), namespace, fence, &x)
	}
	require.Equal(t, "10.0.0.1:5758", address(name.Namespace, nil))
	require.Empty(t, a.address(t.Context(), name.Namespace, fence, nil))
	require.Empty(t, address("other", nil), "the Pod is in another namespace")
	for what, forge := range map[string]func(*v1alpha1.Assignment){
		"another agent":        func(x *v1alpha1.Assignment) { x.AgentUID = "other" },
		"another Pod":          func(x *v1alpha1.Assignment) { x.AgentPod = "other" },
		"an address elsewhere": func(x *v1alpha1.Assignment) { x.AgentAddress = "192.0.2.1:5758" },
		"no address":           func(x *v1alpha1.Assignment) { x.AgentAddress = "" },
	} {
		require.Empty(t, address(name.Namespace, forge), what)
	}
	f.registry.agents["agent-uid"] = registered("10.0.0.2:5758", "pool")
	require.Equal(t, "10.0.0.2:5758", address(name.Namespace, nil), "the Pod has a new address")
	require.Empty(t, address("other", nil))
}
