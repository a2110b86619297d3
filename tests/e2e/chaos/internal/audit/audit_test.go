package audit_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/tests/e2e/chaos/internal/audit"
)

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func at(seconds int) time.Time { return begin.Add(time.Duration(seconds) * time.Second) }

func ptr[T any](v T) *T { return &v }

// fixture is one acknowledged sandbox in its right state, which tests then change.
type fixture struct {
	calls   []audit.Call
	strikes []audit.Strike
	obs     audit.Observations
}

func healthy() *fixture {
	return &fixture{
		calls: []audit.Call{{
			Life: 0, Op: audit.Create, Name: "a", RequestID: "req-a", Sent: at(0), Answered: at(1), Outcome: audit.Acked, Requests: 1,
			UID: "uid-a", Agent: "agent-1",
		}},
		obs: audit.Observations{
			At:         at(100),
			Resources:  []audit.Resource{{Name: "a", UID: "uid-a", RequestID: "req-a", Phase: "Running", Attempt: 1, AgentUID: "agent-uid-1"}},
			Reports:    []audit.Report{{AgentUID: "agent-uid-1", Name: "a", UID: "uid-a", RequestID: "req-a", Attempt: 1, State: "RUNNING", Persisted: true}},
			Containers: []audit.Container{{ID: "uid-a-1", Name: "a", UID: "uid-a", RequestID: "req-a", Attempt: 1, AgentUID: "agent-uid-1", Running: true}},
			Agents:     map[string]bool{"agent-uid-1": true, "agent-uid-2": true},
			Seen:       map[string]bool{"uid-a": true},
		},
	}
}

// call adds a call on the sandbox.
func (f *fixture) call(c audit.Call) *fixture {
	n := len(f.calls)
	c.Name, c.RequestID, c.Requests = "a", "req-a", max(c.Requests, 1)
	if c.Sent.IsZero() {
		c.Sent = at(10 * n)
	}
	if c.Answered.IsZero() && c.Outcome != audit.Unknown {
		c.Answered = c.Sent.Add(time.Second)
	}
	f.calls = append(f.calls, c)
	return f
}

func (f *fixture) empty() *fixture {
	f.obs.Resources, f.obs.Reports, f.obs.Containers = nil, nil, nil
	return f
}

// killed kills the Pod of the sandbox's agent; the janitor has deleted its container.
func (f *fixture) killed() *fixture {
	f.strikes = append(f.strikes, audit.Strike{Kind: "agent-pod", At: at(5), AgentUID: "agent-uid-1", AgentPod: "agent-1"})
	f.obs.Agents = map[string]bool{"agent-uid-2": true}
	f.obs.Reports, f.obs.Containers = nil, nil
	return f
}

// ended lets the process end by itself.
func (f *fixture) ended(code int32, phase string) *fixture {
	f.calls[0].Spec.Exit = ptr(code)
	r := &f.obs.Resources[0]
	r.Phase, r.ExitCode, r.Finished = phase, ptr(code), true
	f.obs.Containers[0].Running = false
	f.obs.Reports[0].State = "STOPPED"
	return f
}

// judge audits the fixture. The pool's count is right unless the test has set it.
func (f *fixture) judge() audit.Verdict {
	obs := f.obs
	for _, r := range obs.Resources {
		if f.obs.Assigned == 0 && f.obs.Agents[r.AgentUID] && !r.Finished {
			obs.Assigned++
		}
	}
	return audit.Audit(f.calls, f.strikes, obs)
}

func (f *fixture) with(change func(*fixture)) *fixture { change(f); return f }

func deleted() audit.Call { return audit.Call{Op: audit.Delete, Outcome: audit.Acked} }

// second is another container of the sandbox.
func second(running bool, agent string) audit.Container {
	return audit.Container{ID: "uid-a-2", Name: "a", UID: "uid-a", RequestID: "req-a", Attempt: 2, AgentUID: agent, Running: running}
}

func TestAudit(t *testing.T) {
	const lost, leaked, duplicated, stuck = audit.Lost, audit.Leaked, audit.Duplicated, audit.Stuck
	tests := []struct {
		name  string
		state *fixture
		want  []audit.Kind
	}{
		{"the right state", healthy(), nil},

		// Lost.
		{"no custom resource", healthy().with(func(f *fixture) { f.obs.Resources = nil }), []audit.Kind{leaked, lost}},
		{"nothing exists", healthy().empty(), []audit.Kind{lost}},
		{"no container", healthy().with(func(f *fixture) { f.obs.Containers = nil }), []audit.Kind{lost}},
		{"the container's task does not run", healthy().with(func(f *fixture) { f.obs.Containers[0].Running = false }), []audit.Kind{lost}},
		{"the agent does not report it", healthy().with(func(f *fixture) { f.obs.Reports = nil }), []audit.Kind{lost}},
		{"another sandbox has the name", healthy().with(func(f *fixture) { f.obs.Resources[0].UID = "uid-b" }), []audit.Kind{lost}},
		{"deleted without a request", healthy().with(func(f *fixture) { f.obs.Resources[0].Deleting = true }), []audit.Kind{lost}},
		{"Failed for no reason", healthy().with(func(f *fixture) { f.obs.Resources[0].Phase = "Failed" }), []audit.Kind{lost}},
		{"finished, though it should run", healthy().with(func(f *fixture) { f.obs.Resources[0].Finished = true }), []audit.Kind{lost}},
		{"another exit code", healthy().ended(3, "Failed").with(func(f *fixture) { f.obs.Resources[0].ExitCode = ptr[int32](137) }), []audit.Kind{lost}},
		{"Expired, though it does not expire", healthy().with(func(f *fixture) { f.obs.Resources[0].Phase = "Expired"; f.obs.Containers = nil }), []audit.Kind{lost}},
		{"Expired too early", healthy().with(func(f *fixture) {
			f.calls[0].Spec.ExpireTime, f.obs.Resources[0].ExpireTime = at(1000), at(1000)
			f.obs.Resources[0].Phase, f.obs.Containers = "Expired", nil
		}), []audit.Kind{lost}},
		{"an update is missing", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{Label: ptr("x")}}), []audit.Kind{lost}},
		{"the expire time was not moved", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{ExpireTime: ptr(at(1000))}}), []audit.Kind{lost}},
		{"the policy was not changed", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{AutoRecreate: ptr(true)}}), []audit.Kind{lost}},
		{"a delete finds nothing", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}), []audit.Kind{lost}},
		{"a delete finds nothing, and it had ended before", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).with(func(f *fixture) {
			f.obs.Ended = map[string]time.Time{"uid-a": at(9)}
		}), []audit.Kind{lost}},
		{"an update finds nothing, and it ended after", healthy().empty().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).call(deleted()).with(func(f *fixture) {
			f.obs.Ended = map[string]time.Time{"uid-a": at(15)}
		}), []audit.Kind{lost}},
		{"an update finds nothing", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}), []audit.Kind{lost}},
		{"an update finds another", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "FENCE_MISMATCH"}), []audit.Kind{lost}},

		// Leaked.
		{"custom resource after its delete", healthy().call(deleted()).with(func(f *fixture) { f.obs.Reports, f.obs.Containers = nil, nil }), []audit.Kind{leaked}},
		{"container after its delete", healthy().call(deleted()).with(func(f *fixture) { f.obs.Reports, f.obs.Resources = nil, nil }), []audit.Kind{leaked}},
		{"report after its delete", healthy().call(deleted()).with(func(f *fixture) { f.obs.Containers, f.obs.Resources = nil, nil }), []audit.Kind{leaked}},
		{"snapshot after its delete", healthy().call(deleted()).empty().with(func(f *fixture) {
			f.obs.Remnants = []audit.Remnant{{Kind: "snapshot", ID: "uid-a-1", UID: "uid-a"}}
		}), []audit.Kind{leaked}},
		{"refused and present", healthy().with(func(f *fixture) { f.calls[0].Outcome = audit.Refused }), []audit.Kind{leaked, leaked, leaked}},
		{"container of an old attempt", healthy().with(func(f *fixture) {
			f.obs.Containers = append(f.obs.Containers, audit.Container{ID: "uid-a-0", UID: "uid-a", RequestID: "req-a", AgentUID: "agent-uid-2"})
		}), []audit.Kind{leaked}},
		{"container of an agent that was not killed by a fault", healthy().call(deleted()).empty().with(func(f *fixture) {
			f.obs.Containers = []audit.Container{second(false, "agent-uid-9")}
		}), []audit.Kind{leaked}},
		{"container of an expired one", healthy().with(func(f *fixture) {
			f.calls[0].Spec.ExpireTime, f.obs.Resources[0].ExpireTime, f.obs.Resources[0].Phase = at(20), at(20), "Expired"
		}), []audit.Kind{leaked}},
		{"a container without a request", healthy().with(func(f *fixture) {
			f.obs.Containers = append(f.obs.Containers, audit.Container{ID: "z-1", UID: "z", RequestID: "req-z", AgentUID: "agent-uid-1", Running: true})
		}), []audit.Kind{leaked}},
		{"a custom resource without a request", healthy().with(func(f *fixture) {
			f.obs.Resources = append(f.obs.Resources, audit.Resource{Name: "z", UID: "z", RequestID: "req-z", Phase: "Running"})
		}), []audit.Kind{leaked}},
		{"a container with invalid labels", healthy().with(func(f *fixture) {
			f.obs.Containers = append(f.obs.Containers, audit.Container{ID: "z", Broken: "attempt is missing", AgentUID: "agent-uid-1"})
		}), []audit.Kind{leaked}},
		{"a report without a request", healthy().with(func(f *fixture) {
			f.obs.Reports = append(f.obs.Reports, audit.Report{AgentUID: "agent-uid-1", UID: "z", State: "RUNNING"})
		}), []audit.Kind{leaked}},
		{"a log of a living agent's", healthy().with(func(f *fixture) {
			f.obs.Remnants = []audit.Remnant{{Kind: "log", ID: "z-1", UID: "z", AgentUID: "agent-uid-1"}}
		}), []audit.Kind{leaked}},
		{"container of a killed agent", healthy().with(func(f *fixture) {
			orphan := f.obs.Containers
			f.killed().obs.Resources[0].AgentLost, f.obs.Containers = true, orphan
		}), []audit.Kind{leaked}},
		{"slot of a killed agent", healthy().killed().with(func(f *fixture) {
			f.obs.Resources[0].AgentLost = true
			f.obs.Containers = []audit.Container{{ID: "slot", Slot: true, AgentUID: "agent-uid-1"}}
		}), []audit.Kind{leaked}},
		{"snapshot of a killed agent", healthy().killed().with(func(f *fixture) {
			f.obs.Resources[0].AgentLost = true
			f.obs.Remnants = []audit.Remnant{{Kind: "snapshot", ID: "uid-a-1", UID: "uid-a", AgentUID: "agent-uid-1"}}
		}), []audit.Kind{leaked}},
		{"a dependent of a deleted owner", healthy().with(func(f *fixture) { f.obs.Garbage = []string{"configmap x"} }), []audit.Kind{leaked}},
		{"a snapshot without a request", healthy().with(func(f *fixture) { f.obs.Remnants = []audit.Remnant{{Kind: "snapshot", ID: "z-1", UID: "z"}} }), []audit.Kind{leaked}},

		// Duplicated.
		{"two containers run", healthy().with(func(f *fixture) { f.obs.Containers = append(f.obs.Containers, second(true, "agent-uid-2")) }), []audit.Kind{duplicated, leaked}},
		{"two sandboxes for one request", healthy().call(audit.Call{Op: audit.Create, Outcome: audit.Acked, UID: "uid-b"}), []audit.Kind{duplicated}},
		{"two custom resources for one request", healthy().with(func(f *fixture) {
			f.obs.Resources = append(f.obs.Resources, audit.Resource{Name: "b", UID: "uid-b", RequestID: "req-a", Phase: "Running"})
		}), []audit.Kind{duplicated}},

		// Stuck.
		{"Pending", healthy().with(func(f *fixture) { f.obs.Resources[0].Phase = "Pending" }), []audit.Kind{stuck}},
		{"Terminating", healthy().call(deleted()).with(func(f *fixture) { f.obs.Resources[0].Deleting = true; f.obs.Reports, f.obs.Containers = nil, nil }), []audit.Kind{stuck}},
		{"the agent is still deleting", healthy().call(deleted()).with(func(f *fixture) {
			f.obs.Resources, f.obs.Containers, f.obs.Reports[0].State = nil, nil, "TERMINATING"
		}), []audit.Kind{stuck}},
		{"persistence never confirmed to the agent", healthy().with(func(f *fixture) { f.obs.Reports[0].Persisted = false }), []audit.Kind{stuck}},
		{"the agent reports another state", healthy().with(func(f *fixture) { f.obs.Reports[0].State = "CREATING" }), []audit.Kind{stuck}},
		{"past its expire time", healthy().with(func(f *fixture) { f.calls[0].Spec.ExpireTime, f.obs.Resources[0].ExpireTime = at(20), at(20) }), []audit.Kind{stuck}},
		{"AgentLost while the agent is there", healthy().with(func(f *fixture) { f.obs.Resources[0].AgentLost = true }), []audit.Kind{stuck}},
		{"AutoRecreate that did not happen", healthy().killed().with(func(f *fixture) {
			f.calls[0].Spec.AutoRecreate, f.obs.Resources[0].AutoRecreate, f.obs.Resources[0].AgentLost = true, true, true
		}), []audit.Kind{stuck}},
		{"the loss of the agent is not recorded", healthy().killed(), []audit.Kind{stuck}},
		{"the end of the process is not recorded", healthy().with(func(f *fixture) { f.calls[0].Spec.Exit = ptr[int32](0) }), []audit.Kind{stuck}},
		{"a reset that was not executed", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{Reset: ptr(at(10))}}), []audit.Kind{stuck}},
		{"a tombstone that is never removed", healthy().call(deleted()).empty().with(func(f *fixture) {
			f.obs.Tombstones = []audit.Tombstone{{AgentUID: "agent-uid-1", Name: "a", UID: "uid-a"}}
		}), []audit.Kind{stuck}},
		{"a tombstone without a request", healthy().with(func(f *fixture) { f.obs.Tombstones = []audit.Tombstone{{UID: "z"}} }), []audit.Kind{stuck}},
		{"a reservation that is never released", healthy().with(func(f *fixture) { f.obs.Reserved = map[string]int{"agent-uid-1": 1, "agent-uid-2": 1} }), []audit.Kind{stuck}},
		{"a reservation of an ended process", healthy().ended(0, "Running").with(func(f *fixture) { f.obs.Reserved = map[string]int{"agent-uid-1": 1} }), []audit.Kind{stuck}},
		{"an ended process that is counted", healthy().ended(3, "Failed").with(func(f *fixture) { f.obs.Assigned = 1 }), []audit.Kind{stuck}},
		{"a wrong count", healthy().with(func(f *fixture) { f.obs.Assigned = 2 }), []audit.Kind{stuck}},
		{"a delete without an answer", healthy().call(audit.Call{Op: audit.Delete, Outcome: audit.Unknown}), []audit.Kind{stuck}},
		{"a create without an answer", healthy().with(func(f *fixture) { f.calls[0].Outcome = audit.Unknown }), []audit.Kind{stuck}},

		// Not violations.
		{"deleted", healthy().call(deleted()).empty(), nil},
		{"deleted by a call that was answered with not found", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).with(func(f *fixture) {
			f.obs.Ended = map[string]time.Time{"uid-a": at(10).Add(time.Millisecond)}
		}), nil},
		{"refused", healthy().empty().with(func(f *fixture) { f.calls[0].Outcome = audit.Refused }), nil},
		{"unanswered, and deleted by name", healthy().empty().with(func(f *fixture) { f.calls[0].Outcome = audit.Unknown }).call(deleted()), nil},
		{"deleted by a call that had to be repeated", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Acked, Requests: 2, Unsure: true}), nil},
		{"a delete that overtook the create", healthy().call(audit.Call{
			Op: audit.Delete, Sent: at(0), Answered: at(0), Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND",
		}), nil},
		{"a delete that came in the middle of the create", healthy().empty().call(audit.Call{
			Op: audit.Delete, Sent: at(0), Answered: at(2), Outcome: audit.Acked,
		}), nil},
		{"the same answer twice", healthy().call(audit.Call{Op: audit.Create, Outcome: audit.Acked, UID: "uid-a"}), nil},
		{"finished with 0", healthy().ended(0, "Running").with(func(f *fixture) { f.obs.Reserved = map[string]int{"agent-uid-1": 0} }), nil},
		{"failed with 3", healthy().ended(3, "Failed"), nil},
		{"finished, and its agent's Pod killed later", healthy().ended(0, "Running").killed(), nil},
		{"expired", healthy().with(func(f *fixture) {
			f.calls[0].Spec.ExpireTime, f.obs.Resources[0].ExpireTime, f.obs.Resources[0].Phase = at(20), at(20), "Expired"
			f.obs.Containers, f.obs.Reports = nil, nil
		}), nil},
		{"Manual, its agent's Pod killed", healthy().killed().with(func(f *fixture) { f.obs.Resources[0].AgentLost = true }), nil},
		{"AutoRecreate, running again", healthy().killed().with(func(f *fixture) {
			f.calls[0].Spec.AutoRecreate, f.obs.Resources[0].AutoRecreate = true, true
			f.obs.Resources[0].Attempt, f.obs.Resources[0].AgentUID = 2, "agent-uid-2"
			f.obs.Containers = append(f.obs.Containers, second(true, "agent-uid-2"))
			f.obs.Reports = []audit.Report{{AgentUID: "agent-uid-2", UID: "uid-a", RequestID: "req-a", Attempt: 2, State: "RUNNING", Persisted: true}}
		}), nil},
		{"its only record was lost with its agent's Pod", healthy().killed().empty().with(func(f *fixture) { f.obs.Seen = nil }), nil},
		{"its record was lost after it was written", healthy().killed().empty(), []audit.Kind{lost}},
		{"updates that are kept", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{
			Label: ptr("x"), ExpireTime: ptr(at(1000).Add(300 * time.Millisecond)), AutoRecreate: ptr(true), Reset: ptr(at(10)),
		}}).with(func(f *fixture) {
			r := &f.obs.Resources[0]
			r.Label, r.ExpireTime, r.AutoRecreate, r.AcceptedReset = "x", at(1000), true, at(10)
		}), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := tt.state.judge()
			var kinds []audit.Kind
			for _, x := range v.Violations {
				kinds = append(kinds, x.Kind)
			}
			slices.Sort(kinds)
			require.Equal(t, tt.want, kinds, "%+v", v.Violations)
			for _, kind := range []audit.Kind{lost, leaked, duplicated, stuck} {
				require.Equal(t, slices.Contains(kinds, kind), audit.Count(kind, v, v) == 1, "one life is counted once for each kind, however often it is judged")
			}
			if len(kinds) > 0 {
				require.Contains(t, audit.Explain(v, tt.state.calls, tt.state.strikes, tt.state.obs), "VIOLATION "+string(kinds[0]))
			}
		})
	}
}

// What a killed agent leaves is the janitor's to delete, and a violation until it has.
func TestOrphansAreViolations(t *testing.T) {
	f := healthy().call(deleted()).killed()
	f.obs.Resources = nil
	f.obs.Containers = []audit.Container{{ID: "uid-a-1", UID: "uid-a", AgentUID: "agent-uid-1"}, {ID: "slot", Slot: true, AgentUID: "agent-uid-1"}}
	f.obs.Remnants = []audit.Remnant{{Kind: "log", ID: "z-1", UID: "z", AgentUID: "agent-uid-1"}}
	v := f.judge()
	require.Equal(t, []string{"uid-a-1", "z-1", "slot"}, v.Orphans)
	require.Equal(t, 3, audit.Count(audit.Leaked, v))
}

func TestUnclaimedSlotIsAllowed(t *testing.T) {
	f := healthy()
	f.obs.Containers = append(f.obs.Containers, audit.Container{ID: "slot", Slot: true, AgentUID: "agent-uid-1", Running: true})
	require.Empty(t, f.judge().Violations)
}

func TestLostWithAgent(t *testing.T) {
	f := healthy().killed().empty()
	f.obs.Seen = nil
	require.Equal(t, []int{0}, f.judge().LostWithAgent)
}

// TestShimIsKilled: the failure policy says what becomes of a sandbox whose shim was killed, and of no other one.
func TestShimIsKilled(t *testing.T) {
	ended := func(struck bool) *fixture {
		f := healthy().ended(137, "Failed")
		f.calls[0].Spec.Exit = nil
		if struck {
			f.strikes = append(f.strikes, audit.Strike{Kind: "shim", At: at(5), Containers: []string{"uid-a-1"}})
		}
		return f
	}
	recreate := func(f *fixture) *fixture {
		f.calls[0].Spec.AutoRecreate, f.obs.Resources[0].AutoRecreate = true, true
		return f
	}
	require.Equal(t, 1, audit.Count(audit.Lost, ended(false).judge()), "nothing has ended it")
	require.Empty(t, ended(true).judge().Violations)
	require.Equal(t, 1, audit.Count(audit.Stuck, recreate(ended(true)).judge()), "it was not recreated")
	flipped := recreate(ended(true)).call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{AutoRecreate: ptr(true)}})
	require.Empty(t, flipped.judge().Violations, "the policy was another one when it ended")
	other := ended(true)
	other.strikes[0].Containers = []string{"uid-b-1"}
	require.Equal(t, 1, audit.Count(audit.Lost, other.judge()))
}

// TestExplain checks the report that people use to find a defect.
func TestExplain(t *testing.T) {
	f := healthy().with(func(f *fixture) { f.obs.Containers[0].Running = false; f.obs.Resources[0].Dump = "the whole resource" })
	f.strikes = []audit.Strike{{Kind: "containerd", At: at(3), Target: "pid 7"}}
	text := audit.Explain(f.judge(), f.calls, f.strikes, f.obs)
	for _, part := range []string{"VIOLATION lost", "req-a", "FAULT containerd pid 7", "the whole resource", "report of agent agent-uid-1", "container uid-a-1"} {
		require.Contains(t, text, part)
	}
}

func TestLivesOfOneNameAreSeparate(t *testing.T) {
	f := healthy().call(deleted())
	f.calls = append(f.calls, audit.Call{Life: 1, Op: audit.Create, Name: "a", RequestID: "req-b", Sent: at(30), Answered: at(31), Outcome: audit.Acked, UID: "uid-b"})
	v := f.judge() // the first exists, the second does not
	require.Equal(t, 1, audit.Count(audit.Leaked, v))
	require.Equal(t, 1, audit.Count(audit.Lost, v))
}
