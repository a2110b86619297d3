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

// world is one acknowledged sandbox as it should be, for tests to spoil.
type world struct {
	calls   []audit.Call
	strikes []audit.Strike
	obs     audit.Observations
}

func healthy() *world {
	return &world{
		calls: []audit.Call{{
			Life: 0, Op: audit.Create, Name: "a", RequestID: "req-a", Sent: at(0), Answered: at(1), Outcome: audit.Acked, Tries: 1,
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
func (w *world) call(c audit.Call) *world {
	n := len(w.calls)
	c.Name, c.RequestID, c.Tries = "a", "req-a", max(c.Tries, 1)
	if c.Sent.IsZero() {
		c.Sent = at(10 * n)
	}
	if c.Answered.IsZero() && c.Outcome != audit.Unknown {
		c.Answered = c.Sent.Add(time.Second)
	}
	w.calls = append(w.calls, c)
	return w
}

func (w *world) empty() *world {
	w.obs.Resources, w.obs.Reports, w.obs.Containers = nil, nil, nil
	return w
}

// killed has the Pod of the sandbox's agent killed.
func (w *world) killed() *world {
	w.strikes = append(w.strikes, audit.Strike{Kind: "agent-pod", At: at(5), AgentUID: "agent-uid-1", AgentPod: "agent-1"})
	w.obs.Agents = map[string]bool{"agent-uid-2": true}
	w.obs.Reports = nil
	w.obs.Containers[0].Running = false
	return w
}

// ended has the process end by itself.
func (w *world) ended(code int32, phase string) *world {
	w.calls[0].Spec.Exit = ptr(code)
	r := &w.obs.Resources[0]
	r.Phase, r.ExitCode, r.Finished = phase, ptr(code), true
	w.obs.Containers[0].Running = false
	w.obs.Reports[0].State = "STOPPED"
	return w
}

// judge audits the world. The pool's count is right unless the test has set it.
func (w *world) judge() audit.Verdict {
	obs := w.obs
	for _, r := range obs.Resources {
		if w.obs.Assigned == 0 && w.obs.Agents[r.AgentUID] {
			obs.Assigned++
		}
	}
	return audit.Audit(w.calls, w.strikes, obs)
}

func (w *world) with(change func(*world)) *world { change(w); return w }

func deleted() audit.Call { return audit.Call{Op: audit.Delete, Outcome: audit.Acked} }

// second is another container of the sandbox.
func second(running bool, agent string) audit.Container {
	return audit.Container{ID: "uid-a-2", Name: "a", UID: "uid-a", RequestID: "req-a", Attempt: 2, AgentUID: agent, Running: running}
}

func TestAudit(t *testing.T) {
	const lost, leaked, duplicated, stuck = audit.Lost, audit.Leaked, audit.Duplicated, audit.Stuck
	tests := []struct {
		name  string
		world *world
		want  []audit.Kind
	}{
		{"as it should be", healthy(), nil},

		// Lost.
		{"no custom resource", healthy().with(func(w *world) { w.obs.Resources = nil }), []audit.Kind{leaked, lost}},
		{"nothing at all", healthy().empty(), []audit.Kind{lost}},
		{"no container", healthy().with(func(w *world) { w.obs.Containers = nil }), []audit.Kind{lost}},
		{"the container's task does not run", healthy().with(func(w *world) { w.obs.Containers[0].Running = false }), []audit.Kind{lost}},
		{"the agent does not report it", healthy().with(func(w *world) { w.obs.Reports = nil }), []audit.Kind{lost}},
		{"the name is another sandbox's", healthy().with(func(w *world) { w.obs.Resources[0].UID = "uid-b" }), []audit.Kind{lost}},
		{"deleted by nobody", healthy().with(func(w *world) { w.obs.Resources[0].Deleting = true }), []audit.Kind{lost}},
		{"Failed for no reason", healthy().with(func(w *world) { w.obs.Resources[0].Phase = "Failed" }), []audit.Kind{lost}},
		{"finished, though it should run", healthy().with(func(w *world) { w.obs.Resources[0].Finished = true }), []audit.Kind{lost}},
		{"another exit code", healthy().ended(3, "Failed").with(func(w *world) { w.obs.Resources[0].ExitCode = ptr[int32](137) }), []audit.Kind{lost}},
		{"Expired, though it does not expire", healthy().with(func(w *world) { w.obs.Resources[0].Phase = "Expired"; w.obs.Containers = nil }), []audit.Kind{lost}},
		{"Expired too early", healthy().with(func(w *world) {
			w.calls[0].Spec.ExpireTime, w.obs.Resources[0].ExpireTime = at(1000), at(1000)
			w.obs.Resources[0].Phase, w.obs.Containers = "Expired", nil
		}), []audit.Kind{lost}},
		{"an update is not there", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{Label: ptr("x")}}), []audit.Kind{lost}},
		{"the expire time was not moved", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{ExpireTime: ptr(at(1000))}}), []audit.Kind{lost}},
		{"the policy was not changed", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{AutoRecreate: ptr(true)}}), []audit.Kind{lost}},
		{"a delete finds nothing", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}), []audit.Kind{lost}},
		{"a delete finds nothing, and it had ended before", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).with(func(w *world) {
			w.obs.Ended = map[string]time.Time{"uid-a": at(9)}
		}), []audit.Kind{lost}},
		{"an update finds nothing, and it ended after", healthy().empty().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).call(deleted()).with(func(w *world) {
			w.obs.Ended = map[string]time.Time{"uid-a": at(15)}
		}), []audit.Kind{lost}},
		{"an update finds nothing", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}), []audit.Kind{lost}},
		{"an update finds another", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Refused, Reason: "FENCE_MISMATCH"}), []audit.Kind{lost}},

		// Leaked.
		{"custom resource after its delete", healthy().call(deleted()).with(func(w *world) { w.obs.Reports, w.obs.Containers = nil, nil }), []audit.Kind{leaked}},
		{"container after its delete", healthy().call(deleted()).with(func(w *world) { w.obs.Reports, w.obs.Resources = nil, nil }), []audit.Kind{leaked}},
		{"report after its delete", healthy().call(deleted()).with(func(w *world) { w.obs.Containers, w.obs.Resources = nil, nil }), []audit.Kind{leaked}},
		{"snapshot after its delete", healthy().call(deleted()).empty().with(func(w *world) {
			w.obs.Remnants = []audit.Remnant{{Kind: "snapshot", ID: "uid-a-1", UID: "uid-a"}}
		}), []audit.Kind{leaked}},
		{"refused and there", healthy().with(func(w *world) { w.calls[0].Outcome = audit.Refused }), []audit.Kind{leaked, leaked, leaked}},
		{"container of an old attempt", healthy().with(func(w *world) {
			w.obs.Containers = append(w.obs.Containers, audit.Container{ID: "uid-a-0", UID: "uid-a", RequestID: "req-a", AgentUID: "agent-uid-2"})
		}), []audit.Kind{leaked}},
		{"container of an agent that went by itself", healthy().call(deleted()).empty().with(func(w *world) {
			w.obs.Containers = []audit.Container{second(false, "agent-uid-9")}
		}), []audit.Kind{leaked}},
		{"container of an expired one", healthy().with(func(w *world) {
			w.calls[0].Spec.ExpireTime, w.obs.Resources[0].ExpireTime, w.obs.Resources[0].Phase = at(20), at(20), "Expired"
		}), []audit.Kind{leaked}},
		{"nobody's container", healthy().with(func(w *world) {
			w.obs.Containers = append(w.obs.Containers, audit.Container{ID: "z-1", UID: "z", RequestID: "req-z", AgentUID: "agent-uid-1", Running: true})
		}), []audit.Kind{leaked}},
		{"nobody's custom resource", healthy().with(func(w *world) {
			w.obs.Resources = append(w.obs.Resources, audit.Resource{Name: "z", UID: "z", RequestID: "req-z", Phase: "Running"})
		}), []audit.Kind{leaked}},
		{"a container whose labels do not add up", healthy().with(func(w *world) {
			w.obs.Containers = append(w.obs.Containers, audit.Container{ID: "z", Broken: "attempt is missing", AgentUID: "agent-uid-1"})
		}), []audit.Kind{leaked}},
		{"nobody's report", healthy().with(func(w *world) {
			w.obs.Reports = append(w.obs.Reports, audit.Report{AgentUID: "agent-uid-1", UID: "z", State: "RUNNING"})
		}), []audit.Kind{leaked}},
		{"a log of a living agent's", healthy().with(func(w *world) {
			w.obs.Remnants = []audit.Remnant{{Kind: "log", ID: "z-1", UID: "z", AgentUID: "agent-uid-1"}}
		}), []audit.Kind{leaked}},
		{"nobody's snapshot", healthy().with(func(w *world) { w.obs.Remnants = []audit.Remnant{{Kind: "snapshot", ID: "z-1", UID: "z"}} }), []audit.Kind{leaked}},

		// Duplicated.
		{"two containers run", healthy().with(func(w *world) { w.obs.Containers = append(w.obs.Containers, second(true, "agent-uid-2")) }), []audit.Kind{duplicated, leaked}},
		{"two sandboxes for one request", healthy().call(audit.Call{Op: audit.Create, Outcome: audit.Acked, UID: "uid-b"}), []audit.Kind{duplicated}},
		{"two custom resources for one request", healthy().with(func(w *world) {
			w.obs.Resources = append(w.obs.Resources, audit.Resource{Name: "b", UID: "uid-b", RequestID: "req-a", Phase: "Running"})
		}), []audit.Kind{duplicated}},

		// Stuck.
		{"Pending", healthy().with(func(w *world) { w.obs.Resources[0].Phase = "Pending" }), []audit.Kind{stuck}},
		{"Terminating", healthy().call(deleted()).with(func(w *world) { w.obs.Resources[0].Deleting = true; w.obs.Reports, w.obs.Containers = nil, nil }), []audit.Kind{stuck}},
		{"the agent is still deleting", healthy().call(deleted()).with(func(w *world) {
			w.obs.Resources, w.obs.Containers, w.obs.Reports[0].State = nil, nil, "TERMINATING"
		}), []audit.Kind{stuck}},
		{"never told that it is persisted", healthy().with(func(w *world) { w.obs.Reports[0].Persisted = false }), []audit.Kind{stuck}},
		{"the agent's word is another", healthy().with(func(w *world) { w.obs.Reports[0].State = "CREATING" }), []audit.Kind{stuck}},
		{"past its expire time", healthy().with(func(w *world) { w.calls[0].Spec.ExpireTime, w.obs.Resources[0].ExpireTime = at(20), at(20) }), []audit.Kind{stuck}},
		{"AgentLost while the agent is there", healthy().with(func(w *world) { w.obs.Resources[0].AgentLost = true }), []audit.Kind{stuck}},
		{"AutoRecreate that did not", healthy().killed().with(func(w *world) {
			w.calls[0].Spec.AutoRecreate, w.obs.Resources[0].AutoRecreate, w.obs.Resources[0].AgentLost = true, true, true
		}), []audit.Kind{stuck}},
		{"nobody noticed the agent's end", healthy().killed(), []audit.Kind{stuck}},
		{"a process that ended unnoticed", healthy().with(func(w *world) { w.calls[0].Spec.Exit = ptr[int32](0) }), []audit.Kind{stuck}},
		{"a reset that was not carried out", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{Reset: ptr(at(10))}}), []audit.Kind{stuck}},
		{"a tombstone that is never forgotten", healthy().call(deleted()).empty().with(func(w *world) {
			w.obs.Tombstones = []audit.Tombstone{{AgentUID: "agent-uid-1", Name: "a", UID: "uid-a"}}
		}), []audit.Kind{stuck}},
		{"nobody's tombstone", healthy().with(func(w *world) { w.obs.Tombstones = []audit.Tombstone{{UID: "z"}} }), []audit.Kind{stuck}},
		{"a place that nobody gives back", healthy().with(func(w *world) { w.obs.Places = map[string]int{"agent-uid-1": 1, "agent-uid-2": 1} }), []audit.Kind{stuck}},
		{"a wrong count", healthy().with(func(w *world) { w.obs.Assigned = 2 }), []audit.Kind{stuck}},
		{"a delete that nobody answers", healthy().call(audit.Call{Op: audit.Delete, Outcome: audit.Unknown}), []audit.Kind{stuck}},
		{"a create that nobody answers", healthy().with(func(w *world) { w.calls[0].Outcome = audit.Unknown }), []audit.Kind{stuck}},

		// Not violations.
		{"deleted", healthy().call(deleted()).empty(), nil},
		{"deleted by a call that was told that there is nothing", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND"}).with(func(w *world) {
			w.obs.Ended = map[string]time.Time{"uid-a": at(10).Add(time.Millisecond)}
		}), nil},
		{"refused", healthy().empty().with(func(w *world) { w.calls[0].Outcome = audit.Refused }), nil},
		{"unanswered, and deleted by name", healthy().empty().with(func(w *world) { w.calls[0].Outcome = audit.Unknown }).call(deleted()), nil},
		{"deleted by a call that had to be repeated", healthy().empty().call(audit.Call{Op: audit.Delete, Outcome: audit.Acked, Tries: 2, Unsure: true}), nil},
		{"a delete that overtook the create", healthy().call(audit.Call{
			Op: audit.Delete, Sent: at(0), Answered: at(0), Outcome: audit.Refused, Reason: "SANDBOX_NOT_FOUND",
		}), nil},
		{"a delete that came in the middle of the create", healthy().empty().call(audit.Call{
			Op: audit.Delete, Sent: at(0), Answered: at(2), Outcome: audit.Acked,
		}), nil},
		{"the same answer twice", healthy().call(audit.Call{Op: audit.Create, Outcome: audit.Acked, UID: "uid-a"}), nil},
		{"finished with 0", healthy().ended(0, "Running"), nil},
		{"failed with 3", healthy().ended(3, "Failed"), nil},
		{"finished, and its agent's Pod killed later", healthy().ended(0, "Running").killed(), nil},
		{"expired", healthy().with(func(w *world) {
			w.calls[0].Spec.ExpireTime, w.obs.Resources[0].ExpireTime, w.obs.Resources[0].Phase = at(20), at(20), "Expired"
			w.obs.Containers, w.obs.Reports = nil, nil
		}), nil},
		{"Manual, its agent's Pod killed", healthy().killed().with(func(w *world) { w.obs.Resources[0].AgentLost = true }), nil},
		{"AutoRecreate, running again", healthy().killed().with(func(w *world) {
			w.calls[0].Spec.AutoRecreate, w.obs.Resources[0].AutoRecreate = true, true
			w.obs.Resources[0].Attempt, w.obs.Resources[0].AgentUID = 2, "agent-uid-2"
			w.obs.Containers = append(w.obs.Containers, second(true, "agent-uid-2"))
			w.obs.Reports = []audit.Report{{AgentUID: "agent-uid-2", UID: "uid-a", RequestID: "req-a", Attempt: 2, State: "RUNNING", Persisted: true}}
		}), nil},
		{"its only record went with its agent's Pod", healthy().killed().empty().with(func(w *world) { w.obs.Seen = nil }), nil},
		{"its record went after it was written", healthy().killed().empty(), []audit.Kind{lost}},
		{"updates that stand", healthy().call(audit.Call{Op: audit.Update, Outcome: audit.Acked, Change: audit.Change{
			Label: ptr("x"), ExpireTime: ptr(at(1000).Add(300 * time.Millisecond)), AutoRecreate: ptr(true), Reset: ptr(at(10)),
		}}).with(func(w *world) {
			r := &w.obs.Resources[0]
			r.Label, r.ExpireTime, r.AutoRecreate, r.AcceptedReset = "x", at(1000), true, at(10)
		}), nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := tt.world.judge()
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
				require.Contains(t, audit.Explain(v, tt.world.calls, tt.world.strikes, tt.world.obs), "VIOLATION "+string(kinds[0]))
			}
		})
	}
}

func TestContainersOfKilledAgentsAreListedApart(t *testing.T) {
	w := healthy().call(deleted()).killed()
	w.obs.Resources = nil
	w.obs.Containers = append(w.obs.Containers, audit.Container{ID: "slot", Slot: true, AgentUID: "agent-uid-1"})
	w.obs.Remnants = append(w.obs.Remnants, audit.Remnant{Kind: "log", ID: "z-1", UID: "z", AgentUID: "agent-uid-1"})
	v := w.judge()
	require.Empty(t, v.Violations)
	require.Equal(t, []string{"uid-a-1", "z-1", "slot"}, v.Orphans)
}

func TestASlotOfALivingAgentIsNobodysAndStays(t *testing.T) {
	w := healthy()
	w.obs.Containers = append(w.obs.Containers, audit.Container{ID: "slot", Slot: true, AgentUID: "agent-uid-1", Running: true})
	require.Empty(t, w.judge().Violations)
}

func TestWhatGoesWithItsAgentIsTold(t *testing.T) {
	w := healthy().killed().empty()
	w.obs.Seen = nil
	require.Equal(t, []int{0}, w.judge().LostWithAgent)
}

// TestTheHistoryTellsAll reads what a person gets to find a defect by.
func TestTheHistoryTellsAll(t *testing.T) {
	w := healthy().with(func(w *world) { w.obs.Containers[0].Running = false; w.obs.Resources[0].Dump = "the whole resource" })
	w.strikes = []audit.Strike{{Kind: "containerd", At: at(3), Target: "pid 7"}}
	text := audit.Explain(w.judge(), w.calls, w.strikes, w.obs)
	for _, part := range []string{"VIOLATION lost", "req-a", "FAULT containerd pid 7", "the whole resource", "report of agent agent-uid-1", "container uid-a-1"} {
		require.Contains(t, text, part)
	}
}

func TestLivesUnderOneNameAreKeptApart(t *testing.T) {
	w := healthy().call(deleted())
	w.calls = append(w.calls, audit.Call{Life: 1, Op: audit.Create, Name: "a", RequestID: "req-b", Sent: at(30), Answered: at(31), Outcome: audit.Acked, UID: "uid-b"})
	v := w.judge() // the first is there, the second is not
	require.Equal(t, 1, audit.Count(audit.Leaked, v))
	require.Equal(t, 1, audit.Count(audit.Lost, v))
}
