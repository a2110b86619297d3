package state_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion/state"
)

func states() []state.State {
	var all []state.State
	for s := state.Queued; s <= state.Withdrawn; s++ {
		all = append(all, s)
	}
	return all
}

func events() []state.Event {
	var all []state.Event
	for e := state.CallStarted; e <= state.Withdraw; e++ {
		all = append(all, e)
	}
	return all
}

// TestNext holds every pair of a state and an event to what the package comment draws; every pair that is not listed leaves the
// state as it is.
func TestNext(t *testing.T) {
	type pair struct {
		s state.State
		e state.Event
	}
	want := map[pair]state.State{
		{state.Queued, state.CallStarted}:         state.Calling,
		{state.Queued, state.ContainerRemoved}:    state.Removed,
		{state.Queued, state.ResourceDeleted}:     state.Settled,
		{state.Queued, state.Withdraw}:            state.Withdrawn,
		{state.Calling, state.CallRefused}:        state.Queued,
		{state.Calling, state.CallLost}:           state.Uncertain,
		{state.Calling, state.AgentAccepted}:      state.Accepted,
		{state.Calling, state.ContainerRemoved}:   state.Removed,
		{state.Calling, state.ResourceDeleted}:    state.Settled,
		{state.Uncertain, state.CallStarted}:      state.Repeating,
		{state.Uncertain, state.ContainerRemoved}: state.Removed,
		{state.Uncertain, state.ResourceDeleted}:  state.Settled,
		{state.Repeating, state.CallRefused}:      state.Uncertain,
		{state.Repeating, state.CallLost}:         state.Uncertain,
		{state.Repeating, state.AgentAccepted}:    state.Accepted,
		{state.Repeating, state.ContainerRemoved}: state.Removed,
		{state.Repeating, state.ResourceDeleted}:  state.Settled,
		{state.Accepted, state.ContainerRemoved}:  state.Removed,
		{state.Accepted, state.ResourceAbsent}:    state.Absent,
		{state.Accepted, state.ResourceDeleted}:   state.Settled,
		{state.Absent, state.ContainerRemoved}:    state.Settling,
		{state.Absent, state.ResourceDeleted}:     state.Settled,
		{state.Settled, state.ContainerRemoved}:   state.Dropping,
		{state.Removed, state.ResourceAbsent}:     state.Settling,
		{state.Removed, state.ResourceDeleted}:    state.Dropping,
		{state.Removed, state.Unrecorded}:         state.Done,
		{state.Settling, state.ResourceDeleted}:   state.Dropping,
		{state.Settling, state.SettleTimePassed}:  state.Rechecking,
		{state.Rechecking, state.ResourceAbsent}:  state.Dropping,
		{state.Rechecking, state.ResourceDeleted}: state.Dropping,
		{state.Dropping, state.TombstoneDropped}:  state.Confirming,
		{state.Confirming, state.Confirmed}:       state.Done,
	}
	require.Len(t, states(), 14)
	require.Len(t, events(), 12)
	for _, s := range states() {
		for _, e := range events() {
			next, changed := state.Next(s, e)
			expected, listed := want[pair{s, e}]
			if !listed {
				expected = s
			}
			require.Equal(t, expected, next, "%s, %s", s, e)
			require.Equal(t, listed, changed, "%s, %s", s, e)
		}
	}
}

func TestNeverBackFromAcknowledged(t *testing.T) {
	for _, s := range states() {
		for _, e := range events() {
			next, _ := state.Next(s, e)
			if s.Acknowledged() {
				require.True(t, next.Acknowledged(), "%s, %s: a durable deletion stays durable", s, e)
			}
			if s.ContainerRemoved() {
				require.True(t, next.ContainerRemoved(), "%s, %s: a container that is gone stays gone", s, e)
			}
			if s.Terminal() {
				require.Equal(t, s, next, "%s, %s", s, e)
			}
			if next == state.Withdrawn && s != state.Withdrawn {
				require.Equal(t, state.Queued, s, "only what neither an agent nor the API server has received may be withdrawn")
			}
		}
	}
}

// TestEveryStateEnds walks from each state along all events: an end is always in reach.
func TestEveryStateEnds(t *testing.T) {
	for _, from := range states() {
		seen, queue, ends := map[state.State]bool{from: true}, []state.State{from}, false
		for ; len(queue) > 0; queue = queue[1:] {
			ends = ends || queue[0].Terminal()
			for _, e := range events() {
				if next, _ := state.Next(queue[0], e); !seen[next] {
					seen[next] = true
					queue = append(queue, next)
				}
			}
		}
		require.True(t, ends, from.String())
	}
}

func TestNames(t *testing.T) {
	names := map[string]bool{}
	for _, s := range states() {
		names[s.String()] = true
	}
	for _, e := range events() {
		names[e.String()] = true
	}
	require.Len(t, names, len(states())+len(events()), "each has a name of its own")
	require.NotContains(t, names, "Unknown")
	require.Equal(t, "Unknown", state.State(99).String())
	require.Equal(t, "Unknown", state.Event(-1).String())
}

// TestEvidenceCommutes: what the agent and the API server report arrives in any order, and leads to the same state.
func TestEvidenceCommutes(t *testing.T) {
	evidence := []state.Event{state.ContainerRemoved, state.ResourceAbsent, state.ResourceDeleted}
	compared := 0
	for _, s := range states() {
		for _, a := range evidence {
			for _, b := range evidence {
				afterA, okA := state.Next(s, a)
				afterB, okB := state.Next(s, b)
				if !okA || !okB || a == b {
					continue
				}
				ab, _ := state.Next(afterA, b)
				ba, _ := state.Next(afterB, a)
				require.Equal(t, ab, ba, "%s: %s, %s", s, a, b)
				compared++
			}
		}
	}
	require.Equal(t, 20, compared, "pairs that mean something in one state")
}

// TestDoneNeedsAllEvidence follows every path from Queued to Done, with what a deletion has learned on it.
func TestDoneNeedsAllEvidence(t *testing.T) {
	type path struct {
		s                                                           state.State
		removed, absent, settled, still, deleted, dropped, unrecord bool
	}
	seen, queue, ends := map[path]bool{}, []path{{s: state.Queued}}, 0
	for ; len(queue) > 0; queue = queue[1:] {
		for _, e := range events() {
			p := queue[0]
			next, ok := state.Next(p.s, e)
			if !ok {
				continue
			}
			p.s = next
			switch e { //nolint:exhaustive // the others are no evidence
			case state.ContainerRemoved:
				p.removed = true
			case state.ResourceAbsent:
				p.still = p.settled // the second look
				p.absent = true
			case state.SettleTimePassed:
				p.settled = p.absent
			case state.ResourceDeleted:
				p.deleted = true
			case state.TombstoneDropped:
				require.True(t, p.removed, "the tombstone outlives the container")
				require.True(t, p.deleted || p.still, "the tombstone outlives the custom resource, and every write of it")
				p.dropped = true
			case state.Unrecorded:
				p.unrecord = true
			}
			if next == state.Done {
				ends++
				require.True(t, p.removed && (p.dropped || p.unrecord), "%+v", p)
			}
			if !seen[p] {
				seen[p] = true
				queue = append(queue, p)
			}
		}
	}
	require.Greater(t, ends, 3, "with and without a record, by each kind of evidence")
}
