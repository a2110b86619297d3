package agents

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"pgregory.net/rapid"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

const (
	kindAgent     = allocatorv1.WatchAgentsResponse_TYPE_AGENT
	kindSandboxes = allocatorv1.WatchAgentsResponse_TYPE_SANDBOXES
	kindGone      = allocatorv1.WatchAgentsResponse_TYPE_AGENT_GONE
	kindSynced    = allocatorv1.WatchAgentsResponse_TYPE_SYNCED

	stateRunning    = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	stateStopped    = agentv1.SandboxState_SANDBOX_STATE_STOPPED
	stateTerminated = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

func reportOf(uid string, attempt int64, state agentv1.SandboxState) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: state, Record: &agentv1.SandboxRecord{Namespace: "ns", Name: uid, Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt}}}
}

func message(kind allocatorv1.WatchAgentsResponse_Type, agent string, reports ...*agentv1.SandboxReport) *allocatorv1.WatchAgentsResponse {
	return &allocatorv1.WatchAgentsResponse{Type: kind, Sandboxes: reports,
		Agent: &allocatorv1.Agent{Ready: true, Info: &agentv1.AgentInfo{PodUid: agent, Namespace: "ns", Pool: "pool"}}}
}

// recorded counts the notifications of a subscriber.
type recorded struct{ sandboxes, pools map[string]int }

// syncedIndex returns an index of an empty Registry.
func syncedIndex() (*Index, *clocktesting.FakeClock, *recorded) {
	clock := clocktesting.NewFakeClock(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	x, r := NewIndex(clock), &recorded{map[string]int{}, map[string]int{}}
	x.Subscribe(Subscriber{}) // without functions
	x.Subscribe(Subscriber{Sandbox: func(n types.NamespacedName) { r.sandboxes[n.Name]++ }, Pool: func(n types.NamespacedName) { r.pools[n.Name]++ }})
	x.begin()
	x.apply(&allocatorv1.WatchAgentsResponse{Type: kindSynced})
	return x, clock, r
}

// The report of a removed container stays for terminatedRetention, and is then removed with the next message of its agent.
func TestTerminatedReportsAreForgotten(t *testing.T) {
	x, clock, _ := syncedIndex()
	gone := identity.Fence{AgentUID: "a", SandboxUID: "gone", Attempt: 1}
	x.apply(message(kindAgent, "a", reportOf("gone", 1, stateRunning), reportOf("stays", 1, stateRunning)))
	x.apply(message(kindSandboxes, "a", reportOf("gone", 1, stateTerminated)))
	clock.Step(terminatedRetention)
	x.apply(message(kindSandboxes, "a"))
	require.NotNil(t, x.Report(gone))
	clock.Step(time.Nanosecond)
	x.apply(message(kindSandboxes, "a"))
	require.Nil(t, x.Report(gone))
	require.NotContains(t, x.live.bySandbox, "gone")
	require.Len(t, x.Reports("stays"), 1)
}

// A removed container is removed from the list of its agent at once.
func TestViewHasNoTerminatedReports(t *testing.T) {
	x, _, _ := syncedIndex()
	x.apply(message(kindAgent, "a", reportOf("u", 1, stateTerminated), reportOf("u", 2, stateRunning)))
	a, ok := x.Agent("a")
	require.True(t, ok)
	require.Len(t, a.Sandboxes, 1)
	require.EqualValues(t, 2, a.Sandboxes[0].GetRecord().GetFence().GetAttempt())
	require.Len(t, x.Reports("u"), 1)
}

// TestNotifications: each message notifies about the sandboxes that it changes, once, and about the pool of its agent.
func TestNotifications(t *testing.T) {
	unready := func(m *allocatorv1.WatchAgentsResponse) *allocatorv1.WatchAgentsResponse {
		m.Agent.Ready = false
		return m
	}
	reason := func(m *allocatorv1.WatchAgentsResponse) *allocatorv1.WatchAgentsResponse {
		m.Agent.Reason = "Draining"
		return m
	}
	before := func() *allocatorv1.WatchAgentsResponse {
		return message(kindAgent, "a", reportOf("u", 1, stateRunning), reportOf("v", 1, stateRunning))
	}
	for name, tc := range map[string]struct {
		message *allocatorv1.WatchAgentsResponse
		want    map[string]int
		pool    int
	}{
		"nothing new":                   {before(), map[string]int{}, 1},
		"the agent is not ready":        {unready(before()), map[string]int{"u": 1, "v": 1}, 1},
		"the reason has changed":        {reason(before()), map[string]int{"u": 1, "v": 1}, 1},
		"one report has changed":        {message(kindSandboxes, "a", reportOf("u", 1, stateStopped)), map[string]int{"u": 1}, 1},
		"one is reported again":         {message(kindSandboxes, "a", reportOf("u", 1, stateRunning)), map[string]int{}, 1},
		"one is no longer listed":       {message(kindAgent, "a", reportOf("u", 1, stateRunning)), map[string]int{"v": 1}, 1},
		"the agent is gone":             {message(kindGone, "a"), map[string]int{"u": 1, "v": 1}, 1},
		"another agent is gone":         {message(kindGone, "b"), map[string]int{}, 0},
		"sandboxes of an unknown agent": {message(kindSandboxes, "b", reportOf("w", 1, stateRunning)), map[string]int{}, 0},
		"an agent without a uid":        {message(kindAgent, "", reportOf("w", 1, stateRunning)), map[string]int{}, 0},
		"a message of a newer version":  {&allocatorv1.WatchAgentsResponse{}, map[string]int{}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			x, _, r := syncedIndex()
			x.apply(before())
			clear(r.sandboxes)
			clear(r.pools)
			x.apply(tc.message)
			require.Equal(t, tc.want, r.sandboxes)
			require.Equal(t, tc.pool, r.pools["pool"])
			require.Nil(t, x.Report(identity.Fence{AgentUID: "b", SandboxUID: "w", Attempt: 1}))
		})
	}
}

// A message about sandboxes may contain the agent, whose load has changed with them.
func TestSandboxesUpdateTheAgent(t *testing.T) {
	x, _, _ := syncedIndex()
	x.apply(message(kindAgent, "a"))
	m := message(kindSandboxes, "a")
	m.Agent.Allocated = 3
	x.apply(m)
	a, _ := x.Agent("a")
	require.EqualValues(t, 3, a.GetAllocated())
	m.Agent = nil
	m.Sandboxes = nil
	x.apply(m)
	a, _ = x.Agent("a")
	require.EqualValues(t, 3, a.GetAllocated())
}

// SYNCED of a stream that was synced before changes no content.
func TestSecondSynced(t *testing.T) {
	x, _, _ := syncedIndex()
	x.apply(message(kindAgent, "a", reportOf("u", 1, stateRunning)))
	x.apply(&allocatorv1.WatchAgentsResponse{Type: kindSynced})
	require.True(t, x.Synced())
	require.Len(t, x.Reports("u"), 1)
	require.Equal(t, defaultHeartbeatTimeout, x.HeartbeatTimeout(), "an older allocator sends no timeout")
}

// TestIndexAgreesWithAModel applies random messages, and compares the queries with the reports by agent and fence.
func TestIndexAgreesWithAModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		x, _, _ := syncedIndex()
		model := map[string]map[identity.Fence]agentv1.SandboxState{}
		for range rapid.IntRange(1, 40).Draw(t, "messages") {
			agent := rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "agent")
			kind := rapid.SampledFrom([]allocatorv1.WatchAgentsResponse_Type{kindAgent, kindSandboxes, kindSandboxes, kindGone}).Draw(t, "kind")
			var reports []*agentv1.SandboxReport
			for range rapid.IntRange(0, 3).Draw(t, "reports") {
				reports = append(reports, reportOf(rapid.SampledFrom([]string{"u", "v"}).Draw(t, "uid"), rapid.Int64Range(1, 2).Draw(t, "attempt"),
					rapid.SampledFrom([]agentv1.SandboxState{stateRunning, stateStopped, stateTerminated}).Draw(t, "state")))
			}
			x.apply(message(kind, agent, reports...))
			switch kind {
			case kindGone:
				delete(model, agent)
			case kindAgent:
				model[agent] = map[identity.Fence]agentv1.SandboxState{}
			}
			if model[agent] != nil {
				for _, r := range reports {
					model[agent][fenceOf(agent, r)] = r.GetState()
				}
			}
			for uid := range map[string]bool{"u": true, "v": true} {
				want := map[string]bool{}
				for agent, reports := range model {
					for f, state := range reports {
						if f.SandboxUID == uid && state != stateTerminated {
							want[fmt.Sprint(agent, f.Attempt, state)] = true
						}
					}
				}
				require.Len(t, x.Reports(uid), len(want), "%s in %v", uid, model)
			}
			for agent, reports := range model {
				for f, state := range reports {
					require.Equal(t, state, x.Report(f).GetState(), "%v of %s", f, agent)
				}
			}
			require.Len(t, x.Pool(types.NamespacedName{Namespace: "ns", Name: "pool"}), len(model))
		}
	})
}

// TestRereadNotifiesOnce: nothing of a second reading is visible before its SYNCED, which notifies once about everything in
// either reading. A reading that breaks off changes nothing.
func TestRereadNotifiesOnce(t *testing.T) {
	x, _, r := syncedIndex()
	x.apply(message(kindAgent, "a", reportOf("both", 1, stateRunning), reportOf("removed", 1, stateRunning)))
	other := func(m *allocatorv1.WatchAgentsResponse) *allocatorv1.WatchAgentsResponse {
		m.Agent.Info.Pool = "other"
		return m
	}
	for _, broken := range []bool{true, false} {
		clear(r.sandboxes)
		clear(r.pools)
		x.begin()
		require.False(t, x.Synced())
		x.apply(message(kindAgent, "a", reportOf("both", 1, stateStopped)))
		x.apply(other(message(kindAgent, "b", reportOf("both", 2, stateRunning), reportOf("added", 1, stateRunning))))
		require.Empty(t, r.sandboxes)
		require.Empty(t, r.pools)
		require.Len(t, x.Reports("removed"), 1, "the previous reading is still served")
		require.Empty(t, x.Reports("added"))
		require.Equal(t, Unknown, x.Status("a"))
		require.Equal(t, Unknown, x.Status("b"))
		if broken {
			x.end()
			continue
		}
		x.apply(&allocatorv1.WatchAgentsResponse{Type: kindSynced})
	}
	require.Equal(t, map[string]int{"both": 1, "removed": 1, "added": 1}, r.sandboxes)
	require.Equal(t, map[string]int{"pool": 1, "other": 1}, r.pools)
	require.Equal(t, []int{2, 0, 1}, []int{len(x.Reports("both")), len(x.Reports("removed")), len(x.Reports("added"))})
	require.Equal(t, []Status{Ready, Ready, Absent}, []Status{x.Status("a"), x.Status("b"), x.Status("c")})
}
