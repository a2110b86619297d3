package verdict_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// kinds are all kinds of remnants but logs and shims; see TestKindsAreComplete.
var kinds = []verdict.Kind{verdict.Snapshot, verdict.FIFOs, verdict.Mount, verdict.Cgroup, verdict.Bundle, verdict.Range} //nolint:gochecknoglobals // a constant

// remnants calls check with every combination of a kind, an agent's state, and times before, at and after each limit.
func remnants(check func(r verdict.Remnant)) {
	ages := []time.Duration{-time.Second, 0, policy.LeftoverGrace - 1, policy.LeftoverGrace, policy.LogRetention - 1, policy.LogRetention, 100 * time.Hour}
	for _, kind := range append([]verdict.Kind{verdict.Log, verdict.Shim}, kinds...) {
		for _, agent := range agents {
			for _, since := range ages {
				for _, deletedAge := range ages {
					for _, deleted := range []bool{false, true} {
						check(verdict.Remnant{ContainerID: "u-1", Kind: kind, Since: since, Agent: agent, Deleted: deleted, DeletedAge: deletedAge})
					}
				}
			}
		}
	}
}

func TestKindsAreComplete(t *testing.T) {
	names := map[string]bool{verdict.Log.String(): true, verdict.Shim.String(): true}
	for _, k := range kinds {
		names[k.String()] = true
	}
	for k := verdict.Kind(0); k.String() != "invalid"; k++ {
		require.True(t, names[k.String()], k.String())
		delete(names, k.String())
	}
	require.Empty(t, names)
}

// TestRemnantVerdictIsItsReasons: whatever the remnant, the action is that of the reason, and the reason is one for remnants.
func TestRemnantVerdictIsItsReasons(t *testing.T) {
	seen := map[verdict.Reason]bool{}
	remnants(func(r verdict.Remnant) {
		v := verdict.DecideRemnant(r, policy)
		require.Equal(t, v.Reason.Action(), v.Action, "%+v", r)
		seen[v.Reason] = true
	})
	require.Equal(t, map[verdict.Reason]bool{
		verdict.Leftover: true, verdict.LeftoverYoung: true, verdict.LogOfAgent: true, verdict.LogRetained: true, verdict.AnotherCluster: true,
		verdict.AgentPodUnknown: true, verdict.ShimOfAgent: true,
	}, seen)
}

// TestUnknownAgentNeverHastensTheRemoval: only an agent that is gone shortens a grace period. Every other state is treated alike.
func TestUnknownAgentNeverHastensTheRemoval(t *testing.T) {
	remnants(func(r verdict.Remnant) {
		if r.Kind == verdict.Log || r.Kind == verdict.Shim || r.Agent == verdict.AgentGone {
			return
		}
		v := verdict.DecideRemnant(r, policy)
		require.Equal(t, r.Since >= policy.LeftoverGrace, v.Action == verdict.Delete, "%+v", r)
		r.Agent = verdict.AgentUnknown
		require.Equal(t, v, verdict.DecideRemnant(r, policy), "%+v", r)
	})
}

// TestGoneAgentLeavesNothing: what it left is removed at once, but for logs that are to be retained.
func TestGoneAgentLeavesNothing(t *testing.T) {
	none := policy
	none.LogRetention = 0
	remnants(func(r verdict.Remnant) {
		if r.Agent != verdict.AgentGone || r.DeletedAge < 0 {
			return
		}
		require.Equal(t, verdict.Verdict{Action: verdict.Delete, Reason: verdict.Leftover}, verdict.DecideRemnant(r, none), "%+v", r)
	})
}

// TestLogOfLivingAgentIsItsOwn: unless the janitor deleted the container, the agent removes the log, however old it is.
func TestLogOfLivingAgentIsItsOwn(t *testing.T) {
	remnants(func(r verdict.Remnant) {
		if r.Kind != verdict.Log || r.Agent == verdict.AgentGone || r.Deleted {
			return
		}
		require.NotEqual(t, verdict.Delete, verdict.DecideRemnant(r, policy).Action, "%+v", r)
	})
}

// TestShimIsRemovedOnlyWithItsAgent: an agent that lives, or of which nothing is known, may use its shim for the next create, however old it is.
func TestShimIsRemovedOnlyWithItsAgent(t *testing.T) {
	remnants(func(r verdict.Remnant) {
		if r.Kind != verdict.Shim {
			return
		}
		require.Equal(t, r.Agent == verdict.AgentGone, verdict.DecideRemnant(r, policy).Action == verdict.Delete, "%+v", r)
	})
}

// TestTimeOnlyHelps: a remnant that is to be deleted stays so as time passes.
func TestTimeOnlyHelps(t *testing.T) {
	remnants(func(r verdict.Remnant) {
		if verdict.DecideRemnant(r, policy).Action != verdict.Delete {
			return
		}
		r.Since += time.Hour
		r.DeletedAge += time.Hour
		require.Equal(t, verdict.Delete, verdict.DecideRemnant(r, policy).Action, "%+v", r)
	})
}
