package store_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

func TestWatchOfOneName(t *testing.T) {
	s := newStore()
	named := func(uid, name string) *store.Record {
		r := record(uid)
		r.Record.Name = name
		return r
	}
	s.SetRecord(named("u1", "one"))
	s.SetRecord(named("u2", "two"))
	initial, w := s.Watch(store.Filter{Namespace: "ns", Name: "two"})
	defer w.Close()
	require.Len(t, initial, 1)
	require.Equal(t, "u2", initial[0].GetUid())
	// The agent reports a sandbox that is being created, which is not visible yet.
	creating := report("u4", agentv1.SandboxState_SANDBOX_STATE_CREATING)
	creating.Record.Name = "four"
	s.AgentSandboxes("a", []*agentv1.SandboxReport{creating})
	unseen, four := s.Watch(store.Filter{Namespace: "ns", Name: "four"})
	defer four.Close()
	require.Empty(t, unseen)
	absent, later := s.Watch(store.Filter{Namespace: "ns", Name: "three"})
	defer later.Close()
	require.Empty(t, absent)
	other, elsewhere := s.Watch(store.Filter{Namespace: "ns", Name: "two", Pool: "another"})
	defer elsewhere.Close()
	require.Empty(t, other, "the rest of the filter holds, too")
	s.SetRecord(named("u3", "three"))
	e := <-later.Events()
	require.Equal(t, sandboxv1.WatchSandboxesResponse_TYPE_ADDED, e.GetType())
	require.Equal(t, "u3", e.GetSandbox().GetUid())
	require.Empty(t, w.Events(), "changes of other sandboxes are not sent")
}

// BenchmarkWatchOfOneName is what every create does: it must not depend on how many sandboxes there are.
func BenchmarkWatchOfOneName(b *testing.B) {
	for _, n := range []int{100, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := newStore()
			for i := range n {
				r := record(fmt.Sprint("u", i))
				r.Record.Name = fmt.Sprint("n", i)
				s.SetRecord(r)
			}
			for b.Loop() {
				_, w := s.Watch(store.Filter{Namespace: "ns", Name: "n50"})
				w.Close()
			}
		})
	}
}
