package store_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// reportBy returns the report of one agent on a running container of a name.
func reportBy(agent, uid, name string) *agentv1.SandboxReport {
	r := report(uid, agentv1.SandboxState_SANDBOX_STATE_RUNNING)
	r.Record.Name, r.Record.Fence.AgentUid = name, agent
	return r
}

// names returns the names of the visible sandboxes.
func names(t *testing.T, s *store.Store) []string {
	t.Helper()
	all, _, err := s.List(store.Filter{}, 100, "")
	require.NoError(t, err)
	var out []string
	for _, sb := range all {
		out = append(out, sb.GetName())
	}
	return out
}

// TestReportsOfSeveralAgents: what one agent sends replaces or removes its own reports only.
func TestReportsOfSeveralAgents(t *testing.T) {
	s := newStore()
	one, two, three := reportBy("a", "u1", "one"), reportBy("a", "u2", "two"), reportBy("b", "u3", "three")
	s.AgentSandboxes("a", []*agentv1.SandboxReport{one, two})
	s.AgentSandboxes("b", []*agentv1.SandboxReport{three})
	require.Equal(t, []string{"one", "three", "two"}, names(t, s))
	s.AgentSandboxes("a", []*agentv1.SandboxReport{two})
	require.Equal(t, []string{"three", "two"}, names(t, s), "a list without a container removes it")
	s.AgentChanges("a", []*agentv1.SandboxReport{one})
	require.Equal(t, []string{"one", "three", "two"}, names(t, s), "a change leaves the other reports")
	one = reportBy("a", "u1", "one")
	one.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
	s.AgentChanges("a", []*agentv1.SandboxReport{one, one})
	require.Equal(t, []string{"three", "two"}, names(t, s))
	s.AgentGone("b")
	s.AgentGone("b")
	require.Equal(t, []string{"two"}, names(t, s))
	s.AgentSandboxes("a", nil)
	require.Empty(t, names(t, s))
}

// TestSupersededReport: an attempt that a later record supersedes does not make its sandbox visible, even under another uid.
func TestSupersededReport(t *testing.T) {
	s := newStore()
	first, next := reportBy("a", "u1", "one"), reportBy("b", "u2", "one")
	first.Record.CreateTime, next.Record.CreateTime = &timestamppb.Timestamp{Seconds: 1}, &timestamppb.Timestamp{Seconds: 2}
	next.Record.Superseded = []*agentv1.SupersededAttempt{{Fence: first.GetRecord().GetFence()}}
	uid := func() string {
		item, _ := s.Get(key)
		return item.Sandbox.GetUid()
	}
	s.AgentSandboxes("a", []*agentv1.SandboxReport{first})
	require.Equal(t, "u1", uid())
	s.AgentSandboxes("b", []*agentv1.SandboxReport{next})
	require.Equal(t, "u2", uid())
	item, _ := s.Get(key)
	require.Len(t, item.Superseded, 1, "its deletion covers the superseded attempt")
	require.Equal(t, "u1", item.Superseded[0].GetFence().GetSandboxUid())
	s.AgentGone("b")
	require.Equal(t, "u1", uid(), "no record supersedes it any longer")
}

// TestContainerRemoved is about one container, not about its sandbox or another agent's container.
func TestContainerRemoved(t *testing.T) {
	s := newStore()
	removed := &agentv1.Fence{SandboxUid: "u", Attempt: 1, AgentUid: "a"}
	s.SetContainerRemoved(removed) // before any report
	require.True(t, s.ContainerRemoved(identity.FenceOf(removed)))
	for _, other := range []identity.Fence{{SandboxUID: "u", Attempt: 2, AgentUID: "a"}, {SandboxUID: "u", Attempt: 1, AgentUID: "b"}, {SandboxUID: "v", Attempt: 1, AgentUID: "a"}} {
		require.False(t, s.ContainerRemoved(other), "%s", other)
	}
	s.AgentSandboxes("a", []*agentv1.SandboxReport{reportBy("a", "u", "one")})
	require.Empty(t, names(t, s))
	require.False(t, s.Gone(key, "u"))
	s.AgentSandboxes("b", []*agentv1.SandboxReport{reportBy("b", "u", "one")})
	require.Equal(t, []string{"one"}, names(t, s))
}

// TestResourceTakesPrecedence over a record and a report of its name, whichever arrives first.
func TestResourceTakesPrecedence(t *testing.T) {
	sources := map[string]func(*store.Store){
		"resource": func(s *store.Store) { s.SetResource(resource("r", "1", v1alpha1.PhaseRunning)) },
		"record":   func(s *store.Store) { s.SetRecord(record("m")) },
		"report":   func(s *store.Store) { s.AgentSandboxes("a", []*agentv1.SandboxReport{reportBy("a", "p", "one")}) },
	}
	for want, order := range map[string][][]string{
		"r": {{"resource", "record", "report"}, {"record", "resource", "report"}, {"report", "record", "resource"}, {"report", "resource"}},
		"m": {{"record", "report"}, {"report", "record"}},
		"p": {{"report"}},
	} {
		for _, sent := range order {
			s := newStore()
			_, w := s.Watch(store.Filter{})
			for _, source := range sent {
				sources[source](s)
			}
			item, ok := s.Get(key)
			require.True(t, ok)
			require.Equal(t, want, item.Sandbox.GetUid(), "%v", sent)
			require.Equal(t, want == "r", item.Resource != nil, "%v", sent)
			require.Equal(t, 1, s.Len(), "%v", sent)
			w.Close()
			w.Close()
			events := slices.Collect(func(yield func(*sandboxv1.WatchSandboxesResponse) bool) {
				for e := range w.Events() {
					yield(e)
				}
			})
			require.Equal(t, want, events[len(events)-1].GetSandbox().GetUid(), "%v", sent)
		}
	}
}
