package lifecycle_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/lifecycle"
)

type (
	state  = lifecycle.State
	event  = lifecycle.Event
	phase  = lifecycle.Phase
	action = lifecycle.Action
)

// answer is the result of Next. The zero answer keeps the phase and has no actions.
type answer struct {
	phase   phase
	actions []action
}

func to(p phase, actions ...action) answer { return answer{p, actions} }

const (
	none, pending, bound, running         = lifecycle.None, lifecycle.Pending, lifecycle.Bound, lifecycle.Running
	terminating, expired, failed, gone    = lifecycle.Terminating, lifecycle.Expired, lifecycle.Failed, lifecycle.Gone
	allocate, create, remove, release     = lifecycle.Allocate, lifecycle.Create, lifecycle.Remove, lifecycle.Release
	recordEnd, acceptReset, markLost, fin = lifecycle.RecordEnd, lifecycle.AcceptReset, lifecycle.MarkLost, lifecycle.Finalize
)

// table has every valid state and the answer to every event that has a meaning in it. Other events are ignored.
func table() map[state]map[event]answer {
	waitingUnassigned := func(p phase) map[event]answer {
		return map[event]answer{
			lifecycle.Unassigned:       to(pending, allocate),
			lifecycle.AgentRefused:     to(pending, allocate),
			lifecycle.AgentFailed:      to(failed),
			lifecycle.DeleteRequested:  to(gone, fin),
			lifecycle.ExpireTimePassed: to(expired),
			lifecycle.ResetRequested:   to(pending, acceptReset, allocate),
			lifecycle.ResetWhileLost:   to(pending, acceptReset, allocate),
		}
	}
	waitingAssigned := func(p phase) map[event]answer {
		return map[event]answer{
			lifecycle.Scheduled:           to(bound, create),
			lifecycle.AgentRefused:        to(p, remove),
			lifecycle.AgentCreating:       to(bound),
			lifecycle.AgentRunning:        to(running),
			lifecycle.AgentCompleted:      to(running, recordEnd),
			lifecycle.AgentCrashed:        to(failed, recordEnd),
			lifecycle.AgentFailed:         to(failed, remove),
			lifecycle.AgentTerminated:     to(failed, release),
			lifecycle.AgentLost:           to(bound, markLost),
			lifecycle.RuntimeLost:         to(pending, release, allocate),
			lifecycle.RecoveryTimeoutOver: to(pending, release, allocate),
			lifecycle.DeleteRequested:     to(terminating, remove),
			lifecycle.ExpireTimePassed:    to(p, remove),
			lifecycle.ResetRequested:      to(p, remove),
			lifecycle.ResetWhileLost:      to(pending, release, acceptReset, allocate),
		}
	}
	ended := func(p phase, terminatedAction action) map[event]answer {
		return map[event]answer{
			lifecycle.AgentTerminated:  to(p, terminatedAction),
			lifecycle.DeleteRequested:  to(terminating, remove),
			lifecycle.ExpireTimePassed: to(p, remove),
			lifecycle.ResetRequested:   to(p, remove),
			lifecycle.ResetWhileLost:   to(pending, release, acceptReset, allocate),
		}
	}
	unassigned := func(expiry *answer) map[event]answer {
		m := map[event]answer{
			lifecycle.DeleteRequested: to(gone, fin),
			lifecycle.ResetRequested:  to(pending, acceptReset, allocate),
			lifecycle.ResetWhileLost:  to(pending, acceptReset, allocate),
		}
		if expiry != nil {
			m[lifecycle.ExpireTimePassed] = *expiry
		}
		return m
	}
	with := func(m map[event]answer, e event, a answer) map[event]answer { m[e] = a; return m }
	without := func(m map[event]answer, e event) map[event]answer { delete(m, e); return m }
	toExpired := to(expired)

	terminatingRow := map[event]answer{
		lifecycle.DeleteRequested: to(terminating, remove),
		lifecycle.AgentTerminated: to(gone, release, fin),
	}
	return map[state]map[event]answer{
		{Phase: none}:                    without(with(waitingUnassigned(none), lifecycle.Accepted, to(pending, allocate)), lifecycle.Unassigned),
		{Phase: pending}:                 waitingUnassigned(pending),
		{Phase: bound}:                   waitingUnassigned(bound),
		{Phase: none, Assigned: true}:    waitingAssigned(none),
		{Phase: pending, Assigned: true}: waitingAssigned(pending),
		{Phase: bound, Assigned: true}:   waitingAssigned(bound),

		{Phase: running, Assigned: true}: with(without(without(without(waitingAssigned(running),
			lifecycle.Scheduled), lifecycle.AgentRefused), lifecycle.AgentCreating), lifecycle.AgentLost, to(running, markLost)),
		{Phase: running}: with(unassigned(&toExpired), lifecycle.Unassigned, to(pending, allocate)),
		{Phase: running, Assigned: true, Finished: true}: with(ended(running, release), lifecycle.AgentCompleted, to(running, recordEnd)),
		{Phase: running, Finished: true}:                 unassigned(&toExpired),

		{Phase: terminating, Assigned: true}: terminatingRow,
		{Phase: terminating}: {
			lifecycle.DeleteRequested: to(gone, fin),
			lifecycle.AgentTerminated: to(gone, release, fin),
		},

		{Phase: failed, Assigned: true}: with(ended(failed, release), lifecycle.AgentFailed, to(failed, remove)),
		{Phase: failed}:                 unassigned(nil),
		// Only deletion leaves Expired; a reset does not.
		{Phase: expired}: {lifecycle.DeleteRequested: to(gone, fin)},
		{Phase: expired, Assigned: true}: {
			lifecycle.DeleteRequested:  to(terminating, remove),
			lifecycle.ExpireTimePassed: to(expired, remove),
		},

		{Phase: gone}:                 {},
		{Phase: gone, Assigned: true}: {},
	}
}

func TestEveryStateAndEvent(t *testing.T) {
	rows := table()
	for _, p := range lifecycle.Phases() {
		for _, assigned := range []bool{false, true} {
			require.Contains(t, rows, state{Phase: p, Assigned: assigned}, "state is missing in the table")
		}
	}
	for s, row := range rows {
		for _, e := range lifecycle.Events() {
			t.Run(fmt.Sprintf("%s assigned=%t finished=%t %s", s.Phase, s.Assigned, s.Finished, e), func(t *testing.T) {
				p, actions, ok := lifecycle.Next(s, e)
				want, listed := row[e]
				if !listed {
					require.False(t, ok)
					require.Equal(t, s.Phase, p)
					require.Empty(t, actions)
					return
				}
				require.True(t, ok)
				require.Equal(t, want, answer{p, actions})
			})
		}
	}
}

func TestUnknownEventIsIgnored(t *testing.T) {
	for _, p := range lifecycle.Phases() {
		got, actions, ok := lifecycle.Next(state{Phase: p}, event(99))
		require.False(t, ok)
		require.Empty(t, actions)
		require.Equal(t, p, got)
	}
	require.Equal(t, "Event(unknown)", event(99).String())
}

func TestEventsHaveNames(t *testing.T) {
	seen := map[string]bool{}
	for _, e := range lifecycle.Events() {
		require.NotContains(t, e.String(), "unknown")
		require.False(t, seen[e.String()], "%s is a duplicate", e)
		seen[e.String()] = true
	}
}

// TestAssignmentIsClearedOnlyByRelease follows random events, and checks the invariants that the controller relies on: the
// assignment is cleared only by Remove or Release, and the deletion of a sandbox takes two steps from every state.
func TestAssignmentIsClearedOnlyByRelease(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := state{Phase: none}
		events := lifecycle.Events()
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			e := rapid.SampledFrom(events).Draw(t, "event")
			p, actions, ok := lifecycle.Next(s, e)
			if !ok {
				require.Equal(t, s.Phase, p)
				continue
			}
			has := map[action]bool{}
			for _, a := range actions {
				has[a] = true
			}
			if s.Assigned && (p == gone || p == pending) && p != s.Phase {
				require.True(t, has[release], "%v --%s--> %s leaks a container", s, e, p)
			}
			require.False(t, has[fin] && p != gone, "the record is finalized in phase %s", p)
			require.False(t, has[create] && !s.Assigned, "created without an assignment")
			require.False(t, s.Assigned && p == expired && s.Phase != expired, "expired with a container")
			// Carry the actions out.
			switch {
			case has[release] || has[remove]:
				s.Assigned = false
			case has[allocate]:
				s.Assigned = rapid.Bool().Draw(t, "placed")
			}
			s.Finished = has[recordEnd] && p == running || s.Finished && !has[acceptReset] && p != pending
			s.Phase = p
			if p == gone {
				return
			}
		}
		p, actions, _ := lifecycle.Next(s, lifecycle.DeleteRequested)
		if s.Assigned {
			require.Equal(t, answer{terminating, []action{remove}}, answer{p, actions})
			p, actions, _ = lifecycle.Next(state{Phase: p, Assigned: true}, lifecycle.AgentTerminated)
		}
		require.Equal(t, gone, p)
		require.Contains(t, actions, fin)
	})
}

// states lists every combination of a phase and the flags, also those that the controller never writes.
func states() []state {
	var all []state
	for _, p := range lifecycle.Phases() {
		for _, assigned := range []bool{false, true} {
			for _, finished := range []bool{false, true} {
				all = append(all, state{Phase: p, Assigned: assigned, Finished: finished})
			}
		}
	}
	return all
}

// TestEveryStateIsAllowed: in every combination an ignored event changes nothing, and the actions have an order that can be
// carried out.
func TestEveryStateIsAllowed(t *testing.T) {
	for _, s := range states() {
		for _, e := range append(lifecycle.Events(), 0, -1) {
			p, actions, ok := lifecycle.Next(s, e)
			require.Contains(t, lifecycle.Phases(), p, "%v, %s", s, e)
			if !ok {
				require.Equal(t, answer{phase: s.Phase}, answer{p, actions}, "%v, %s", s, e)
				continue
			}
			at := func(a action) int { return slices.Index(actions, a) }
			require.Len(t, slices.Compact(slices.Sorted(slices.Values(actions))), len(actions), "%v, %s: an action occurs twice", s, e)
			if at(allocate) >= 0 {
				require.Equal(t, len(actions)-1, at(allocate), "%v, %s: capacity is reserved for the next attempt, after the end of the last one", s, e)
				require.Equal(t, pending, p, "%v, %s", s, e)
				require.Equal(t, s.Assigned, at(release) == 0, "%v, %s: exactly an assigned sandbox releases its capacity first", s, e)
			}
			if at(remove) >= 0 {
				require.True(t, s.Assigned, "%v, %s: no agent has the container", s, e)
				require.Len(t, actions, 1, "%v, %s: the removal is waited for", s, e)
			}
			if at(fin) >= 0 {
				require.Equal(t, len(actions)-1, at(fin), "%v, %s: the record is finalized last", s, e)
			}
		}
	}
}

// TestRepeatedEventSettles: most events are raised as long as they are true. A sandbox to which only one event happens, again and
// again, reaches after at most two steps a state that this event does not change.
func TestRepeatedEventSettles(t *testing.T) {
	for _, from := range states() {
		for _, e := range lifecycle.Events() {
			s := from
			step := func() {
				p, actions, _ := lifecycle.Next(s, e)
				s.Phase = p
				s.Assigned = s.Assigned && !slices.Contains(actions, remove) && !slices.Contains(actions, release)
				s.Finished = (s.Finished || slices.Contains(actions, recordEnd)) && !slices.Contains(actions, allocate)
			}
			step()
			step()
			settled := s
			step()
			require.Equal(t, settled, s, "%v, %s", from, e)
		}
	}
}

// TestFinishedSandboxRunsAgainOnlyByReset: no report and no loss of its agent runs a process twice that ended with code 0.
func TestFinishedSandboxRunsAgainOnlyByReset(t *testing.T) {
	for _, assigned := range []bool{false, true} {
		for _, e := range lifecycle.Events() {
			_, actions, _ := lifecycle.Next(state{Phase: running, Assigned: assigned, Finished: true}, e)
			again := slices.Contains(actions, allocate) || slices.Contains(actions, create)
			reset := e == lifecycle.ResetWhileLost || e == lifecycle.ResetRequested && !assigned
			require.Equal(t, reset, again, "assigned=%t, %s", assigned, e)
		}
	}
}
