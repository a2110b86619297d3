package pool

import (
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// assignedTo returns a Sandbox on an agent.
func assignedTo(agent string) *v1alpha1.Sandbox {
	s := waitingSandbox("s")
	s.SetAssignment(&v1alpha1.Assignment{AgentUID: agent, SandboxUID: "s", Attempt: 1})
	s.Status = v1alpha1.SandboxStatus{Phase: v1alpha1.PhaseRunning, Attempt: 1}
	return s
}

// TestDrainedAgentIsDeletedWhenEmpty: each piece of evidence that a draining agent has, or may have, a sandbox keeps its Pod.
func TestDrainedAgentIsDeletedWhenEmpty(t *testing.T) {
	unreachable := func(f *fixture) { f.agents.errs["a"] = errRefused }
	unimplemented := func(f *fixture) {
		f.agents.errs["a"] = fault.New(errdefs.ErrNotImplemented, fault.Internal, "unknown method Drain")
	}
	silent := func(f *fixture) {
		f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.LastHeartbeatTime, a.Ready = nil, false })
	}
	for name, tc := range map[string]struct {
		pod     *corev1.Pod
		objects []client.Object
		script  func(*fixture)
		deleted bool
	}{
		"empty":                       {deleted: true},
		"a sandbox by its own answer": {script: func(f *fixture) { f.agents.sandboxes["a"] = 1 }},
		"a sandbox in its snapshot": {script: func(f *fixture) {
			f.agents.snapshots["a"] = &agentv1.AgentSnapshot{Sandboxes: []*agentv1.SandboxReport{{}}}
		}},
		"a tombstone": {script: func(f *fixture) {
			f.agents.snapshots["a"] = &agentv1.AgentSnapshot{Tombstones: []*agentv1.Tombstone{{}}}
		}},
		"it accepts sandboxes again": {script: func(f *fixture) { f.agents.snapshots["a"] = &agentv1.AgentSnapshot{Accepting: true} }},
		"its snapshot is not read":   {script: func(f *fixture) { f.agents.snapshotErr = errRefused }},
		"an assigned resource":       {objects: []client.Object{assignedTo("a")}},
		"a resource elsewhere":       {objects: []client.Object{assignedTo("b")}, deleted: true},
		"a reservation that the agent refuses": {script: func(f *fixture) {
			f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.Allocated = 3 })
		}, deleted: true},
		"a reservation, and the agent does not answer": {script: func(f *fixture) {
			unreachable(f)
			f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.Allocated, a.LastHeartbeatTime = 3, nil })
		}, pod: agentPod("a", notReady)},
		"it does not answer":                                   {script: unreachable},
		"it never answered and was never ready":                {script: func(f *fixture) { unreachable(f); silent(f) }, pod: agentPod("a", notReady), deleted: true},
		"it was ready once":                                    {script: func(f *fixture) { unreachable(f); silent(f) }},
		"it has sent a heartbeat":                              {script: unreachable, pod: agentPod("a", notReady)},
		"never ready, but the Registry is unknown":             {script: func(f *fixture) { unreachable(f); silent(f); f.index.synced = false }, pod: agentPod("a", notReady)},
		"a version without Drain":                              {script: unimplemented, deleted: true},
		"a version without Drain has a sandbox":                {script: unimplemented, objects: []client.Object{assignedTo("a")}},
		"a version without Drain, and the Registry is unknown": {script: func(f *fixture) { unimplemented(f); f.index.synced = false }},
		"no agent has started":                                 {pod: agentPod("a", notStarted), deleted: true},
	} {
		t.Run(name, func(t *testing.T) {
			pod := tc.pod
			if pod == nil {
				pod = agentPod("a")
			}
			drainedFor("maintenance")(pod)
			f := newFixture(t, append(tc.objects, testPool(), pod)...)
			f.serve("a")
			if tc.script != nil {
				tc.script(f)
			}
			result := f.reconcile()
			if !tc.deleted {
				require.Equal(t, []string{"a"}, f.podNames())
				require.Equal(t, requeue, result.RequeueAfter)
				require.EqualValues(t, 1, f.pool().Status.DrainingAgents)
				return
			}
			require.NotContains(t, f.podNames(), "a")
			require.Equal(t, types.UID("a"), *f.api.deletes["a"].UID)
			require.Zero(t, result.RequeueAfter)
			require.Zero(t, f.pool().Status.DrainingAgents)
		})
	}
}

// A Pod in which no agent has started is deleted only if that is still so.
func TestUnstartedAgentIsDeletedAtItsVersion(t *testing.T) {
	f := newFixture(t, testPool(), agentPod("a", notStarted, drainedFor("maintenance")))
	f.reconcile()
	require.NotNil(t, f.api.deletes["a"].ResourceVersion)
	require.Empty(t, f.agents.drains, "an agent that has not started was called")

	f = newFixture(t, testPool(), agentPod("a", notStarted, drainedFor("maintenance")))
	f.api.fail["delete Pod"] = errConflict
	require.Equal(t, requeue, f.reconcile().RequeueAfter)
	require.Equal(t, []string{"a"}, f.podNames())
	require.Empty(t, f.recorder.take())
}

func TestAgentIsCalledAtItsAddress(t *testing.T) {
	for name, tc := range map[string]struct {
		known bool
		ip    string
		want  string
	}{
		"as the Registry has it":  {true, "10.0.0.1", "a:5758"},
		"unknown to the Registry": {false, "10.0.0.1", "10.0.0.1:5758"},
		"IPv6":                    {false, "fd00::1", "[fd00::1]:5758"},
		"no address yet":          {false, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, testPool(), agentPod("a", drainedFor("maintenance"), func(p *corev1.Pod) { p.Status.PodIP = tc.ip }))
			if tc.known {
				f.serve("a")
			}
			f.reconcile()
			require.Equal(t, []string{tc.want}, f.agents.addresses)
		})
	}
}

// A busy agent and one that does not answer are called once an interval, an empty one in each reconcile.
func TestDrainCallsArePaced(t *testing.T) {
	for name, tc := range map[string]struct {
		script func(*fixture)
		paced  bool
	}{
		"busy":   {func(f *fixture) { f.index.agents["a"] = withReport("a") }, true},
		"silent": {func(f *fixture) { f.agents.errs["a"] = errRefused }, true},
		"idle": {func(f *fixture) {
			f.agents.snapshots["a"] = &agentv1.AgentSnapshot{Tombstones: []*agentv1.Tombstone{{}}}
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, testPool(), agentPod("a", drainedFor("maintenance")))
			f.serve("a")
			tc.script(f)
			f.reconcile()
			require.Len(t, f.agents.drains, 1)
			f.reconcile()
			if !tc.paced {
				require.Len(t, f.agents.drains, 2)
				return
			}
			require.Len(t, f.agents.drains, 1)
			f.clock.Step(requeue)
			f.reconcile()
			require.Len(t, f.agents.drains, 2)
		})
	}
}

// withReport returns an agent in the Registry that reports a sandbox.
func withReport(uid string) agents.Agent {
	a := registered(uid)
	a.Sandboxes = []*agentv1.SandboxReport{{Record: &agentv1.SandboxRecord{Fence: &agentv1.Fence{SandboxUid: "s", Attempt: 1, AgentUid: uid}}}}
	return a
}

// An agent whose annotation a person has removed is asked to resume until the Registry shows that it serves.
func TestRemovedAnnotationResumesAgent(t *testing.T) {
	f := newFixture(t, testPool(), agentPod("a"))
	f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.Ready, a.Reason = false, reasonDraining })
	require.Equal(t, requeue, f.reconcile().RequeueAfter)
	require.Equal(t, []string{"a"}, f.agents.asked(true))
	f.reconcile()
	require.Len(t, f.agents.drains, 1, "asked twice in an interval")
	f.clock.Step(requeue)
	f.reconcile()
	require.Equal(t, []string{"a", "a"}, f.agents.asked(true))
	f.serve("a")
	require.Zero(t, f.reconcile().RequeueAfter)
	require.Len(t, f.agents.drains, 2)
}

// An agent that does not answer is reported once, after the interval; again after it has answered in between.
func TestSilentAgentIsReportedOnce(t *testing.T) {
	f := newFixture(t, testPool(), agentPod("a", drainedFor("maintenance")))
	f.serve("a")
	f.agents.errs["a"] = errRefused
	f.reconcile()
	require.Empty(t, f.recorder.take(), "reported at once")
	step := func() []string {
		f.clock.Step(requeue)
		f.reconcile()
		return f.recorder.take()
	}
	events := step()
	require.Len(t, events, 1)
	require.Contains(t, events[0], "Warning DrainStuck agent Pod a is draining and does not answer")
	require.Contains(t, events[0], "failed by the test")
	require.Empty(t, step())

	f.agents.errs["a"], f.agents.sandboxes["a"] = nil, 1
	require.Empty(t, step())
	f.agents.errs["a"] = errRefused
	require.Empty(t, step())
	require.Len(t, step(), 1)
}

func TestDrainErrors(t *testing.T) {
	f := newFixture(t, testPool(func(p *v1alpha1.SandboxPool) { p.Spec.Capacity.PoolMax = 0 }), agentPod("a"))
	f.serve("a")
	f.reconcile()
	f.clock.Step(shrinkDelay)
	f.api.fail["patch Pod"] = errAPI
	_, err := f.Reconcile(t.Context(), reconcile.Request{NamespacedName: poolID})
	require.ErrorContains(t, err, "draining agent a")
	require.Empty(t, f.agents.drains, "called before the annotation was written")
	require.Empty(t, f.recorder.take())
}

// A cache that does not show the annotation yet does not make a draining agent serve again.
func TestDrainIsExpected(t *testing.T) {
	f := newFixture(t, testPool(), agentPod("a"))
	f.serve("a")
	f.agents.sandboxes["a"] = 1
	f.expect.drained(poolID, "a", v1alpha1.DrainOutdated)
	f.reconcile()
	require.EqualValues(t, 1, f.pool().Status.DrainingAgents)
	f.clock.Step(expectationTime)
	f.reconcile()
	require.Zero(t, f.pool().Status.DrainingAgents)
}

func TestNeverStarted(t *testing.T) {
	container := func(s corev1.ContainerStatus) func(*corev1.Pod) {
		return func(p *corev1.Pod) { s.Name = agentContainer; p.Status.ContainerStatuses = []corev1.ContainerStatus{s} }
	}
	for name, tc := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"running":      {agentPod("a"), false},
		"new":          {agentPod("a", inPhase("")), true},
		"pending":      {agentPod("a", notStarted), true},
		"waiting":      {agentPod("a", notStarted, container(corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}})), true},
		"started":      {agentPod("a", notStarted, container(corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})), false},
		"ended":        {agentPod("a", notStarted, container(corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}})), false},
		"ended before": {agentPod("a", notStarted, container(corev1.ContainerStatus{LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}})), false},
		"restarted":    {agentPod("a", notStarted, container(corev1.ContainerStatus{RestartCount: 1})), false},
		"only another container": {agentPod("a", notStarted, func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "side", RestartCount: 1}}
		}), true},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, neverStarted(tc.pod)) })
	}
}

func TestNeverReady(t *testing.T) {
	changedAt := func(after time.Duration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Status.Conditions[0].LastTransitionTime = metav1.NewTime(start.Add(after)) }
	}
	for name, tc := range map[string]struct {
		pod  *corev1.Pod
		want bool
	}{
		"ready":                      {agentPod("a"), false},
		"not ready since it started": {agentPod("a", notReady), true},
		"within a second":            {agentPod("a", notReady, changedAt(time.Second)), true},
		"was ready":                  {agentPod("a", notReady, changedAt(2*time.Second)), false},
		"start time unknown":         {agentPod("a", notReady, func(p *corev1.Pod) { p.Status.StartTime = nil }), false},
		"no condition":               {agentPod("a", func(p *corev1.Pod) { p.Status.Conditions = nil }), true},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.want, neverReady(tc.pod)) })
	}
}

func TestDrainsForgetMissingPods(t *testing.T) {
	d := newDrains(clocktesting.NewFakeClock(start))
	d.keep(poolID, sets.New[types.UID]("a", "b"))
	for _, uid := range []types.UID{"a", "b", "elsewhere"} {
		d.answered(uid, drainResponse{at: start, sandboxes: 1})
	}
	d.keep(poolID, sets.New[types.UID]("b"))
	require.Zero(t, d.last("a"))
	require.Equal(t, 1, d.last("b").sandboxes)
	require.Equal(t, 1, d.last("elsewhere").sandboxes, "an agent of another pool was forgotten")
	d.keep(poolID, nil)
	require.Zero(t, d.last("b"))
	require.Empty(t, d.pods)
}

func TestReservationsOfConfirmedDrains(t *testing.T) {
	for name, tc := range map[string]struct {
		drain    string
		response drainResponse
		want     int
	}{
		"confirmed":     {"x", drainResponse{drained: true}, 0},
		"not confirmed": {"x", drainResponse{}, 3},
		"serves again":  {"", drainResponse{drained: true}, 3},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDrains(clocktesting.NewFakeClock(start))
			d.answered("a", tc.response)
			m := &member{pod: agentPod("a"), drain: tc.drain}
			m.usage.Reserved = 3
			d.dropReservations(m)
			require.Equal(t, tc.want, m.usage.Reserved)
		})
	}
}

func TestExpectations(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	e := newExpectations(clock)
	e.created(poolID, "a")
	e.created(poolID, "b")
	require.Equal(t, 2, e.observe(poolID, nil))
	require.Equal(t, 1, e.observe(poolID, sets.New[types.UID]("a")))
	require.Zero(t, e.observe(types.NamespacedName{Name: "other"}, nil), "pools are mixed up")

	e.deleted(poolID, "a")
	require.True(t, e.isDeleted(poolID, "a"))
	e.observe(poolID, sets.New[types.UID]("a"))
	require.True(t, e.isDeleted(poolID, "a"), "forgotten while the cache has the Pod")
	e.observe(poolID, nil)
	require.False(t, e.isDeleted(poolID, "a"))

	e.drained(poolID, "c", "why")
	require.Equal(t, "why", e.draining(poolID, "c", ""))
	require.Equal(t, "why", e.draining(poolID, "c", "why"), "the cache shows it")
	require.Empty(t, e.draining(poolID, "c", ""), "a person has removed it since")
	e.drained(poolID, "c", "")
	require.Empty(t, e.draining(poolID, "c", "why"), "the resumed agent is not shown yet")

	e.created(poolID, "d")
	e.forget(poolID)
	require.Zero(t, e.observe(poolID, nil))
}

func TestPodReasonsInMetrics(t *testing.T) {
	for reason, want := range map[string]string{
		v1alpha1.DrainScaleDown: v1alpha1.DrainScaleDown, v1alpha1.DrainOutdated: v1alpha1.DrainOutdated, v1alpha1.DrainPoolDeleted: v1alpha1.DrainPoolDeleted,
		reasonPodFinished: reasonPodFinished, reasonNeverReady: reasonNeverReady, "disk of node-7 fails": "requested", "": "requested",
	} {
		require.Equal(t, want, metricReason(reason), reason)
	}
}
