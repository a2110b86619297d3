package observe_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// agentState returns what the node state holds an agent for, by a container of it.
func (w *testEnv) agentState(t *testing.T) verdict.Agent {
	t.Helper()
	found, err := w.Findings()
	require.NoError(t, err)
	i := slices.IndexFunc(found, func(f observe.Finding) bool { return f.Key.ID == idOne })
	require.NotEqual(t, -1, i)
	return found[i].Observation.Agent
}

func TestStatesOfAnAgent(t *testing.T) {
	steps := map[string]func(*testEnv, *testing.T){
		"the cache shows its Pod": func(w *testEnv, _ *testing.T) { w.alive(agentA) },
		"its Pod is deleted":      func(w *testEnv, _ *testing.T) { w.RemovePod(agentA) },
		"its Pod has ended":       func(w *testEnv, _ *testing.T) { w.SetPod(agentA, true) },
		"the node runs it": func(w *testEnv, t *testing.T) {
			w.change(func(w *testEnv) { w.running[agentA] = true })
			require.NoError(t, w.Scan(t.Context()))
		},
		"the node no longer runs it": func(w *testEnv, t *testing.T) {
			w.change(func(w *testEnv) { delete(w.running, agentA) })
			require.NoError(t, w.Scan(t.Context()))
		},
		"the grace period passes":        func(w *testEnv, _ *testing.T) { w.clock.Step(grace) },
		"nearly the grace period passes": func(w *testEnv, _ *testing.T) { w.clock.Step(grace - 1) },
		"two hours pass":                 func(w *testEnv, t *testing.T) { w.clock.Step(2 * time.Hour); require.NoError(t, w.Scan(t.Context())) },
	}
	for name, test := range map[string]struct {
		steps []string
		want  verdict.Agent
	}{
		"never seen":                           {nil, verdict.AgentUnknown},
		"never seen, for the grace period":     {[]string{"the grace period passes"}, verdict.AgentGone},
		"never seen, for less":                 {[]string{"nearly the grace period passes"}, verdict.AgentUnknown},
		"of another cluster":                   {[]string{"the node runs it"}, verdict.AgentForeign},
		"of another cluster, for ever":         {[]string{"the node runs it", "two hours pass"}, verdict.AgentForeign},
		"of another cluster, ended":            {[]string{"the node runs it", "the node no longer runs it"}, verdict.AgentUnknown},
		"of another cluster, ended for long":   {[]string{"the node runs it", "the node no longer runs it", "the grace period passes"}, verdict.AgentGone},
		"of another cluster, restarting":       {[]string{"the grace period passes", "the node runs it", "the node no longer runs it"}, verdict.AgentUnknown},
		"alive":                                {[]string{"the cache shows its Pod"}, verdict.AgentAlive},
		"alive, not running yet":               {[]string{"the cache shows its Pod", "two hours pass"}, verdict.AgentAlive},
		"deleted":                              {[]string{"the cache shows its Pod", "its Pod is deleted"}, verdict.AgentGone},
		"deleted, its processes still run":     {[]string{"the node runs it", "the cache shows its Pod", "its Pod is deleted"}, verdict.AgentGone},
		"evicted":                              {[]string{"the cache shows its Pod", "its Pod has ended"}, verdict.AgentGone},
		"seen only after it had ended":         {[]string{"its Pod has ended"}, verdict.AgentGone},
		"deleted long ago, with a container":   {[]string{"the cache shows its Pod", "its Pod is deleted", "two hours pass", "two hours pass"}, verdict.AgentGone},
		"shown late by the cache":              {[]string{"the grace period passes", "the cache shows its Pod"}, verdict.AgentAlive},
		"of another cluster, then of this one": {[]string{"the node runs it", "the cache shows its Pod"}, verdict.AgentAlive},
	} {
		t.Run(name, func(t *testing.T) {
			w := synced(t)
			w.addContainer(t, one(w))
			require.Equal(t, verdict.AgentUnknown, w.agentState(t))
			for _, s := range test.steps {
				steps[s](w, t)
			}
			require.Equal(t, test.want, w.agentState(t))
		})
	}
}

// TestForgottenPodCountsAsNeverSeen: a Pod that nothing has named for an hour is forgotten, so that memory stays bounded.
func TestForgottenPodCountsAsNeverSeen(t *testing.T) {
	for after, want := range map[time.Duration]verdict.Agent{59 * time.Minute: verdict.AgentGone, 61 * time.Minute: verdict.AgentUnknown} {
		w := synced(t)
		w.alive(agentA)
		w.RemovePod(agentA)
		w.clock.Step(after)
		require.NoError(t, w.Scan(t.Context()))
		w.addContainer(t, one(w))
		require.Equal(t, want, w.agentState(t), after)
	}
}

// TestFindingsMatchTheNode runs random events and compares what is found after a scan with the node. A container of a living agent
// whose Sandbox is assigned to it is never reported as an orphan, and one of a gone agent always is.
func TestFindingsMatchTheNode(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		w := synced(t)
		agents, alive := []string{"a", "b", "c"}, map[string]bool{}
		for _, uid := range agents {
			w.alive(uid) // each was observed once
			alive[uid] = true
		}
		for range rapid.IntRange(1, 20).Draw(r, "events") {
			uid := rapid.SampledFrom(agents).Draw(r, "agent")
			id := fmt.Sprintf("%d%s", rapid.IntRange(1, 4).Draw(r, "container"), idOne[1:])
			switch rapid.IntRange(0, 5).Draw(r, "event") {
			case 0:
				w.alive(uid)
				alive[uid] = true
			case 1:
				w.change(func(w *testEnv) { delete(w.pods, uid) })
				w.RemovePod(uid)
				alive[uid] = false
			case 2:
				w.change(func(w *testEnv) {
					w.containers[id] = one(w, func(c *observe.Container) {
						c.ID, c.Identity = id, identity.Identity{AgentUID: uid, State: identity.StateSlot}
					})
				})
			case 3:
				w.change(func(w *testEnv) { delete(w.containers, id) })
			case 4:
				w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: id, Part: ctrd.PartBundle, Owner: uid}} })
			case 5:
				w.clock.Step(time.Duration(rapid.IntRange(1, 100).Draw(r, "seconds")) * time.Second)
			}
		}
		w.reported()
		require.NoError(r, w.Scan(t.Context()))
		orphans := map[observe.Key]bool{}
		for _, key := range w.reported() {
			orphans[key] = true
		}
		found, err := w.Findings()
		require.NoError(r, err)
		seen := map[string]bool{}
		for _, f := range found {
			require.Equal(r, f.Verdict.Action == verdict.Delete, orphans[f.Key], "%+v", f)
			if f.Key.Remnant {
				require.NotContains(r, w.containers, f.Key.ID, "a container is no remnant")
				continue
			}
			seen[f.Key.ID] = true
			require.Equal(r, !alive[w.containers[f.Key.ID].Identity.AgentUID], f.Verdict.Action == verdict.Delete, "%+v", f)
		}
		require.Len(r, seen, len(w.containers), "all containers, and no others")
	})
}
