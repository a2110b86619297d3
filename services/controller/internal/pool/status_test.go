package pool

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

func TestCountsAreWrittenOnceAnInterval(t *testing.T) {
	clock := clocktesting.NewFakeClock(time.Unix(1e9, 0))
	p, pool := newPace(clock), types.NamespacedName{Namespace: "ns", Name: "p"}
	require.LessOrEqual(t, p.left(pool), time.Duration(0), "never written")
	p.wrote(pool)
	clock.Step(countsInterval / 4)
	require.Equal(t, 3*countsInterval/4, p.left(pool))
	clock.Step(countsInterval)
	require.LessOrEqual(t, p.left(pool), time.Duration(0))
	p.wrote(pool)
	p.forget(pool)
	require.LessOrEqual(t, p.left(pool), time.Duration(0))
}

func TestOnlyCountsMayWait(t *testing.T) {
	old := v1alpha1.SandboxPoolStatus{ReadyAgents: 1, Capacity: 5, FreeCapacity: 5, ReadySlots: 5}
	busier := old
	busier.ActiveSandboxes, busier.FreeCapacity, busier.ReadySlots = 1, 4, 4
	require.True(t, sameButCounts(old, busier))
	busier.ReadyAgents = 0
	require.False(t, sameButCounts(old, busier))
}

var errTemplate = &templateError{"InvalidTemplate", "no container named agent"}

func TestReadyCondition(t *testing.T) {
	for name, tc := range map[string]struct {
		pool    *v1alpha1.SandboxPool
		sum     summary
		want    int
		problem error
		state   state
	}{
		"ready":                 {testPool(), summary{ready: 1}, 2, nil, state{metav1.ConditionTrue, "AgentsReady", ""}},
		"ready, with a problem": {testPool(), summary{ready: 1}, 2, errAPI, state{metav1.ConditionTrue, "AgentsReady", ""}},
		"being deleted":         {testPool(beingDeleted), summary{ready: 1}, 0, nil, state{metav1.ConditionFalse, "Deleting", "the pool is being deleted and accepts no new sandboxes"}},
		"invalid template":      {testPool(), summary{}, 2, errTemplate, state{metav1.ConditionFalse, "InvalidTemplate", "no container named agent"}},
		"another problem":       {testPool(), summary{}, 2, errors.New("creating agent pod: quota"), state{metav1.ConditionFalse, "ReconcileFailed", "creating agent pod: quota"}},
		"no agents wanted":      {testPool(), summary{}, 0, nil, state{metav1.ConditionFalse, "NoAgentsWanted", "the pool needs no agents"}},
		"runtimes cannot":       {testPool(), summary{runtimes: []desired.RuntimeAgent{{Problem: "old"}}}, 1, nil, state{metav1.ConditionFalse, "RuntimeUnavailable", "no agent is ready: 1 of 1 agents cannot run new sandboxes: old"}},
		"one runtime cannot":    {testPool(), summary{ready: 1, runtimes: []desired.RuntimeAgent{{Problem: "old"}, {}}}, 2, nil, state{metav1.ConditionTrue, "AgentsReady", ""}},
		"not ready yet":         {testPool(), summary{}, 1, nil, state{metav1.ConditionFalse, "AgentsNotReady", "no agent is ready yet"}},
	} {
		t.Run(name, func(t *testing.T) { require.Equal(t, tc.state, readiness(tc.pool, tc.sum, tc.want, tc.problem)) })
	}
}

func TestProgressingCondition(t *testing.T) {
	for name, tc := range map[string]struct {
		pool    *v1alpha1.SandboxPool
		agents  int // Pods, serving or draining
		sum     summary
		want    int
		problem error
		state   state
	}{
		"settled":                      {testPool(), 2, summary{ready: 2, fresh: 2}, 2, nil, state{metav1.ConditionFalse, "Settled", ""}},
		"more than wanted":             {testPool(), 3, summary{ready: 2, fresh: 2}, 2, nil, state{metav1.ConditionFalse, "Settled", ""}},
		"missing":                      {testPool(), 1, summary{ready: 1}, 2, nil, state{metav1.ConditionTrue, "AgentsComing", "1 of 2 agents are ready"}},
		"not ready":                    {testPool(), 2, summary{ready: 1}, 2, nil, state{metav1.ConditionTrue, "AgentsComing", "1 of 2 agents are ready"}},
		"draining":                     {testPool(), 3, summary{ready: 2, draining: 1}, 2, nil, state{metav1.ConditionTrue, "Draining", "1 agent is draining"}},
		"draining agents do not serve": {testPool(), 2, summary{ready: 1, draining: 1}, 2, nil, state{metav1.ConditionTrue, "AgentsComing", "1 of 2 agents are ready"}},
		"rollout":                      {testPool(), 3, summary{ready: 2, fresh: 1, outdated: 1, draining: 1, heldOnDraining: 2}, 2, nil, state{metav1.ConditionTrue, "RollingOut", "1 of 2 agents are ready and up to date with the template; 1 agent is draining, waiting for 2 sandboxes"}},
		"rollout of one":               {testPool(), 1, summary{ready: 1, outdated: 1}, 1, nil, state{metav1.ConditionTrue, "RollingOut", "0 of 1 agent is ready and up to date with the template; no agent is draining"}},
		"problem":                      {testPool(), 2, summary{outdated: 1}, 2, errTemplate, state{metav1.ConditionFalse, "InvalidTemplate", "no container named agent"}},
		"being deleted":                {testPool(beingDeleted), 1, summary{draining: 1, heldOnDraining: 1}, 0, errAPI, state{metav1.ConditionTrue, "Deleting", "1 agent is draining, waiting for 1 sandbox"}},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.state, progressOf(&inventory{expected: tc.agents}, tc.pool, tc.sum, tc.want, tc.problem))
		})
	}
}

func TestWaiting(t *testing.T) {
	for want, s := range map[string]summary{
		"no agent is draining":                         {},
		"1 agent is draining":                          {draining: 1},
		"2 agents are draining, waiting for 1 sandbox": {draining: 2, heldOnDraining: 1},
		"1 agent is draining, waiting for 3 sandboxes, of which 2 ended and will be deleted after ttlAfterFinished": {draining: 1, heldOnDraining: 3, finishedOnDraining: 2},
	} {
		require.Equal(t, want, s.waiting())
	}
}

// TestStatusCounts: one agent of each kind, with its own number of sandboxes.
func TestStatusCounts(t *testing.T) {
	f := newFixture(t, testPool(poolMin(3)), agentPod("busy"), agentPod("coming", notReady), agentPod("draining", drainedFor("maintenance")), agentPod("lost"))
	f.agents.sandboxes["draining"] = 2
	f.index.agents["busy"] = registered("busy", func(a *allocatorv1.Agent) { a.Allocated, a.FreeSlots, a.WantedSlots = 3, 2, 2 })
	f.index.agents["draining"] = withReport("draining")
	f.index.agents["lost"] = registered("lost", func(a *allocatorv1.Agent) { a.Ready, a.FreeSlots = false, 5 })
	f.reconcile()
	got := f.pool().Status
	require.Equal(t, "fast-sandbox.io/component=agent,fast-sandbox.io/pool=py", got.Selector)
	conditions := got.Conditions
	got.Conditions, got.Selector = nil, ""
	require.Equal(t, v1alpha1.SandboxPoolStatus{ObservedGeneration: 3, DesiredAgents: 3, CurrentAgents: 4, ReadyAgents: 2, DrainingAgents: 1,
		Capacity: 10, ActiveSandboxes: 4, FreeCapacity: 7, ReadySlots: 2}, got)
	for _, c := range conditions {
		require.EqualValues(t, 3, c.ObservedGeneration, c.Type)
		require.True(t, c.LastTransitionTime.Time.Equal(start), c.Type)
	}
}

// Counts alone are written once an interval; anything else at once.
func TestStatusOfCountsWaits(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1)), agentPod("a"))
	allocate := func(n int32) {
		f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.Allocated, a.FreeSlots, a.WantedSlots = n, 1, 1 })
	}
	allocate(0)
	f.reconcile()
	allocate(1)
	require.Equal(t, countsInterval, f.reconcile().RequeueAfter)
	require.Zero(t, f.pool().Status.ActiveSandboxes)
	f.clock.Step(countsInterval)
	require.Zero(t, f.reconcile().RequeueAfter)
	require.EqualValues(t, 1, f.pool().Status.ActiveSandboxes)
	require.Equal(t, 2, f.api.writes("patch status SandboxPool"))
	f.reconcile()
	require.Equal(t, 2, f.api.writes("patch status SandboxPool"), "written although nothing has changed")

	f.index.agents["a"] = registered("a", func(a *allocatorv1.Agent) { a.Allocated, a.SlotsOffReason = 2, "no overlay" })
	f.reconcile()
	require.EqualValues(t, 2, f.pool().Status.ActiveSandboxes, "a changed condition has to wait")
}

func TestSlotsCondition(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*v1alpha1.SandboxPool)
		slots  []desired.SlotAgent
		free   int32
		want   *state
	}{
		"ready":         {func(*v1alpha1.SandboxPool) {}, []desired.SlotAgent{{Free: 2, Wanted: 2}, {Free: 1, Wanted: 2}}, 3, &state{metav1.ConditionTrue, "SlotsFree", ""}},
		"no agent":      {func(*v1alpha1.SandboxPool) {}, nil, 0, &state{metav1.ConditionFalse, "AgentsNotReady", "no agent is ready"}},
		"off":           {func(p *v1alpha1.SandboxPool) { p.Spec.Slots = &v1alpha1.PoolSlots{Max: ptr.To(int32(0))} }, []desired.SlotAgent{{Free: 1}}, 1, nil},
		"being deleted": {beingDeleted, []desired.SlotAgent{{Free: 2, Wanted: 2}}, 2, &state{metav1.ConditionFalse, "Deleting", "the pool is being deleted and keeps no slots"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := testPool(tc.change)
			f := newFixture(t)
			f.status.setCondition(p, v1alpha1.ConditionSlotsReady, state{metav1.ConditionFalse, "Old", ""})
			f.status.fillSlots(p, summary{slots: tc.slots})
			require.Equal(t, tc.free, p.Status.ReadySlots)
			c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionSlotsReady)
			if tc.want == nil {
				require.Nil(t, c)
				return
			}
			require.Equal(t, *tc.want, state{c.Status, c.Reason, c.Message})
		})
	}
}

// TestRuntimeCondition: agents whose runtime cannot run sandboxes do not count as ready, although their Pods are, and the pool says why. Agents
// that are not connected have not said anything.
func TestRuntimeCondition(t *testing.T) {
	f := newFixture(t, testPool(poolMin(3)), agentPod("a"), agentPod("b"), agentPod("c"))
	says := func(agent string, ready bool, reason string) {
		f.index.agents[agent] = registered(agent, func(a *allocatorv1.Agent) { a.Ready, a.Reason = ready, reason })
	}
	check := func(readyAgents int32, want state, poolReady string) {
		t.Helper()
		f.clock.Step(time.Minute)
		f.reconcile()
		p := f.pool()
		require.Equal(t, readyAgents, p.Status.ReadyAgents)
		require.Equal(t, readyAgents*5, p.Status.Capacity)
		c := meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionRuntimeReady)
		require.Equal(t, want, state{c.Status, c.Reason, c.Message})
		require.Equal(t, poolReady, meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionReady).Reason)
	}
	says("c", false, "Connecting")
	check(3, state{metav1.ConditionUnknown, "AgentsNotReady", "no agent is ready"}, "AgentsReady")
	says("a", true, "")
	says("b", false, "RUNTIME_UNAVAILABLE: containerd 1.7.29 is too old")
	check(2, state{metav1.ConditionFalse, "RuntimeUnavailable", "1 of 2 agents cannot run new sandboxes: containerd 1.7.29 is too old"}, "AgentsReady")
	says("a", false, "RUNTIME_UNAVAILABLE: containerd 1.7.29 is too old")
	says("c", false, "RUNTIME_UNAVAILABLE: containerd does not answer")
	check(0, state{metav1.ConditionFalse, "RuntimeUnavailable", "3 of 3 agents cannot run new sandboxes: containerd 1.7.29 is too old; containerd does not answer"}, "RuntimeUnavailable")
	for _, agent := range []string{"a", "b", "c"} {
		says(agent, true, "")
	}
	check(3, state{metav1.ConditionTrue, "RuntimesReady", ""}, "AgentsReady")
}

// TestRolloutToRuntimesThatCannotRun: new agents whose nodes cannot run the pool's new runtime handler do not replace those that serve.
func TestRolloutToRuntimesThatCannotRun(t *testing.T) {
	f := newFixture(t, testPool(poolMin(1)), agentPod("old", outdatedPod), agentPod("new"))
	f.index.agents["old"] = registered("old")
	f.index.agents["new"] = registered("new", func(a *allocatorv1.Agent) {
		a.Ready, a.Reason = false, "RUNTIME_UNAVAILABLE: containerd 1.7.29 is too old"
	})
	for range 3 {
		f.clock.Step(shrinkDelay)
		f.reconcile()
	}
	require.Contains(t, f.podNames(), "old")
	require.Empty(t, f.drainReason("old"))
	f.index.agents["new"] = registered("new")
	for range 3 {
		f.clock.Step(shrinkDelay)
		f.reconcile()
	}
	require.Equal(t, []string{"new"}, f.podNames())
}

func TestImagesCondition(t *testing.T) {
	f := newFixture(t)
	p := testPool(withImages("x"))
	i := &inventory{members: map[string]*member{"a": {pod: agentPod("a"), known: true, agent: registered("a", withPinned(pinned("x", ready)))}}}
	condition := func() *metav1.Condition {
		f.status.fillImages(i, p)
		return meta.FindStatusCondition(p.Status.Conditions, v1alpha1.ConditionImagesReady)
	}
	require.Equal(t, metav1.ConditionTrue, condition().Status)
	beingDeleted(p)
	require.Equal(t, reasonDeleting, condition().Reason)
	require.Equal(t, metav1.ConditionFalse, condition().Status)
	p.Spec.Images = nil
	require.Nil(t, condition(), "a pool without images has the condition")
	require.Empty(t, p.Status.Images)
}

// Until the Registry is read, the status of slots and images stays.
func TestStatusKeepsSlotsAndImages(t *testing.T) {
	f := newFixture(t, testPool(withImages("x"), poolMin(1)), agentPod("a"))
	f.index.agents["a"] = registered("a", withPinned(pinned("x", ready)), func(a *allocatorv1.Agent) { a.FreeSlots, a.WantedSlots = 1, 1 })
	f.reconcile()
	before := f.pool().Status
	require.EqualValues(t, 1, before.ReadySlots)
	f.index.synced = false
	clear(f.index.agents)
	f.clock.Step(time.Minute)
	f.reconcile()
	require.Equal(t, before.ReadySlots, f.pool().Status.ReadySlots)
	require.Equal(t, before.Images, f.pool().Status.Images)
	require.True(t, meta.IsStatusConditionTrue(f.pool().Status.Conditions, v1alpha1.ConditionImagesReady))
}

// A failing image is reported once for each message.
func TestImageFailureEvents(t *testing.T) {
	f := newFixture(t, testPool(withImages("x"), poolMin(1)), agentPod("a"))
	report := func(p *agentv1.PinnedImage) []string {
		f.index.agents["a"] = registered("a", withPinned(p))
		f.clock.Step(time.Minute)
		f.reconcile()
		return f.recorder.take()
	}
	require.Equal(t, []string{"Warning ImagePullFailed image x on node node-a: of x"}, report(pinned("x", failed)))
	require.Empty(t, report(pinned("x", failed)))
	require.Equal(t, []string{"Warning ImagePullFailed image x on node node-a: other"}, report(&agentv1.PinnedImage{Image: "x", State: failed, Message: "other"}))
	require.Empty(t, report(pinned("x", ready)))
	require.Len(t, report(pinned("x", failed)), 1)
}

func TestDeletionIsAnnouncedOnce(t *testing.T) {
	f := newFixture(t, testPool(beingDeleted), agentPod("a", drainedFor("maintenance")))
	f.serve("a")
	f.agents.sandboxes["a"] = 1
	f.reconcile()
	require.Equal(t, []string{"Normal Deleting the pool is being deleted: 1 agent is draining, waiting for 1 sandbox"}, f.recorder.take())
	f.agents.sandboxes["a"] = 2
	f.clock.Step(requeue)
	f.reconcile()
	require.Empty(t, f.recorder.take())
}
