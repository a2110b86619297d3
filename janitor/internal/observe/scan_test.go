package observe_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func pack(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	raw, err := anypb.New(m)
	require.NoError(t, err)
	return raw
}

func TestRemnants(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.SetPod("agent-gone", true)
	log := func(owner string, change ...func(*ctrd.Piece)) ctrd.Piece {
		p := ctrd.Piece{ID: idOne, Part: ctrd.PartLog, Owner: owner, Written: w.clock.Now()}
		for _, f := range change {
			f(&p)
		}
		return p
	}
	scan := func(pieces ...ctrd.Piece) map[string]verdict.Reason {
		w.change(func(w *testEnv) { w.pieces = pieces })
		require.NoError(t, w.Scan(t.Context()))
		return w.verdicts(t)
	}
	snapshot := ctrd.Piece{ID: idOne, Part: ctrd.PartSnapshot}
	require.Equal(t, map[string]verdict.Reason{
		idOne + " snapshot": verdict.LeftoverYoung, idOne + " cgroup": verdict.LeftoverYoung, idOne + " log": verdict.LogOfAgent,
	}, scan(snapshot, ctrd.Piece{ID: idOne, Part: ctrd.PartCgroup, Path: "/a"}, log(agentA)))
	w.clock.Step(leftover)
	require.Equal(t, map[string]verdict.Reason{
		idOne + " snapshot": verdict.Leftover, idOne + " fifos": verdict.LeftoverYoung, idOne + " mount": verdict.LeftoverYoung, idOne + " log": verdict.Leftover,
	}, scan(snapshot, ctrd.Piece{ID: idOne, Part: ctrd.PartFIFOs}, ctrd.Piece{ID: idOne, Part: ctrd.PartMount}, log("agent-gone")))
	require.Equal(t, verdict.LogOfAgent, scan(log("agent-gone"), log(agentA))[idOne+" log"], "of two, the one of the living agent decides")
	require.Equal(t, verdict.AgentPodUnknown, scan(log("unknown"))[idOne+" log"])
	require.Equal(t, verdict.Leftover, scan(log(""))[idOne+" log"], "its removal was interrupted")
	require.Equal(t, verdict.Leftover, scan(log(agentA, func(p *ctrd.Piece) { p.Deleted = w.clock.Now() }))[idOne+" log"])
	w.reported()

	key := observe.Key{ID: idOne, Remnant: true, Kind: verdict.Snapshot}
	scan(snapshot)
	w.clock.Step(leftover)
	require.Equal(t, map[string]verdict.Reason{idOne + " snapshot": verdict.Leftover}, scan(snapshot))
	require.Contains(t, w.reported(), key)
	f, err := w.Confirm(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, verdict.Delete, f.Verdict.Action)
	require.Equal(t, []ctrd.Piece{snapshot}, f.Pieces)
	w.change(func(w *testEnv) { w.containers[idOne] = one(w) })
	_, err = w.Confirm(t.Context(), key)
	require.True(t, errdefs.IsNotFound(err), "the container exists now")
	require.Equal(t, map[string]verdict.Reason{idOne: verdict.WithinGrace}, scan(snapshot))
}

func TestAgentOfALogIsConfirmed(t *testing.T) {
	w := synced(t)
	w.SetPod(agentA, true)
	w.change(func(w *testEnv) {
		w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartLog, Owner: agentA, Written: w.clock.Now()}}
	})
	require.NoError(t, w.Scan(t.Context()))
	key := observe.Key{ID: idOne, Remnant: true, Kind: verdict.Log}
	require.Equal(t, []observe.Key{key}, slices.Compact(w.reported()))
	w.change(func(w *testEnv) { w.pods[agentA] = true })
	f, err := w.Confirm(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, verdict.LogOfAgent, f.Verdict.Reason)
	w.change(func(w *testEnv) { delete(w.pods, agentA); w.fail["pods"] = errors.New("away") })
	_, err = w.Confirm(t.Context(), key)
	require.ErrorContains(t, err, "away")
	w.Gone(key)
	_, err = w.Confirm(t.Context(), key)
	require.True(t, errdefs.IsNotFound(err))
}

func TestFailedSurveyRemovesNothing(t *testing.T) {
	w := synced(t)
	w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartMount}} })
	require.NoError(t, w.Scan(t.Context()))
	w.change(func(w *testEnv) { w.pieces, w.fail["survey"] = nil, errors.New("read-only") })
	require.ErrorContains(t, w.Scan(t.Context()), "read-only")
	w.clock.Step(leftover)
	require.Equal(t, map[string]verdict.Reason{idOne + " mount": verdict.Leftover}, w.verdicts(t))
}

// start runs the state until the test ends.
func start(t *testing.T) *testEnv {
	t.Helper()
	w := newTestEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	w.alive(agentA)
	w.SetSynced()
	require.Eventually(t, w.Ready, testkit.Timeout, testkit.Tick)
	return w
}

// stepUntil steps the clock until a condition holds.
func (w *testEnv) stepUntil(t *testing.T, so func() bool, step time.Duration) {
	t.Helper()
	require.Eventually(t, func() bool {
		if so() {
			return true
		}
		w.clock.Step(step)
		return false
	}, testkit.Timeout, testkit.Tick)
}

func TestEventsAreFollowed(t *testing.T) {
	w := start(t)
	w.write(sandbox(uidOne, agentA, 1))
	reason := func() verdict.Reason {
		found, err := w.Findings()
		if err != nil || len(found) != 1 {
			return verdict.NotManaged
		}
		return found[0].Verdict.Reason
	}
	event := func(c *observe.Container) {
		w.mu.Lock()
		delete(w.containers, idOne)
		if c != nil {
			w.containers[idOne] = *c
		}
		changed := w.changed
		w.mu.Unlock()
		changed(idOne)
	}
	require.Eventually(t, func() bool { w.mu.Lock(); defer w.mu.Unlock(); return w.changed != nil }, testkit.Timeout, testkit.Tick)
	young := one(w, unwritten)
	event(&young)
	w.stepUntil(t, func() bool { return reason() == verdict.NotPersisted }, 10*time.Millisecond)
	written := one(w)
	event(&written)
	w.stepUntil(t, func() bool { return reason() == verdict.Assigned }, 10*time.Millisecond)
	event(nil)
	w.stepUntil(t, func() bool { return len(w.verdicts(t)) == 0 }, 10*time.Millisecond)
}

// TestTimeMakesAnOrphan: only the grace period passes, without a scan.
func TestTimeMakesAnOrphan(t *testing.T) {
	w := newTestEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	w.alive(agentA)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.change(func(w *testEnv) { w.containers[idOne] = one(w) })
	w.SetSynced()
	require.NoError(t, w.Scan(t.Context()))
	go func() { ended <- w.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-ended)
	}()
	w.erase(s)
	began := w.clock.Now()
	w.reported() // the first report
	w.stepUntil(t, func() bool { return len(w.reported()) > 0 }, 100*time.Millisecond)
	require.GreaterOrEqual(t, w.clock.Since(began), grace)
}

func TestBreakInTheEventsCausesAScan(t *testing.T) {
	w := start(t)
	scans := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		n := 0
		for _, a := range w.asked {
			if a == "list" {
				n++
			}
		}
		return n
	}
	w.stepUntil(t, func() bool { return scans() >= 2 }, 10*time.Millisecond) // at the start, and when the stream was established
	before := scans()
	w.mu.Lock()
	close(w.broken)
	w.broken = make(chan struct{})
	w.mu.Unlock()
	w.stepUntil(t, func() bool { return scans() > before }, 10*time.Millisecond)
}

// TestRemnantsOfAGoneAgentHaveNoGracePeriod: no create of an agent that is gone is in progress. The agent's end is confirmed first.
func TestRemnantsOfAGoneAgentHaveNoGracePeriod(t *testing.T) {
	for kind, part := range map[verdict.Kind]ctrd.Part{
		verdict.Snapshot: ctrd.PartSnapshot, verdict.Cgroup: ctrd.PartCgroup, verdict.Bundle: ctrd.PartBundle, verdict.Range: ctrd.PartRange,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			w := synced(t)
			w.alive(agentA)
			w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: idOne, Part: part, Owner: agentA}} })
			require.NoError(t, w.Scan(t.Context()))
			name, key := idOne+" "+kind.String(), observe.Key{ID: idOne, Remnant: true, Kind: kind}
			require.Equal(t, verdict.LeftoverYoung, w.verdicts(t)[name], "its agent may be in the middle of a create")
			require.Empty(t, w.reported())

			w.RemovePod(agentA)
			require.Equal(t, []observe.Key{key}, w.reported(), "the end of the agent is reported at once")
			f, err := w.Confirm(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, verdict.LeftoverYoung, f.Verdict.Reason, "the API server still has the Pod")
			w.change(func(w *testEnv) { w.fail["pods"] = errors.New("connection refused") })
			_, err = w.Confirm(t.Context(), key)
			require.ErrorContains(t, err, "connection refused", "no evidence")
			w.change(func(w *testEnv) { delete(w.pods, agentA); delete(w.fail, "pods") })
			f, err = w.Confirm(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, verdict.Delete, f.Verdict.Action)

			w.clock.Step(leftover)
			w.change(func(w *testEnv) { w.fail["pods"] = errors.New("connection refused") })
			f, err = w.Confirm(t.Context(), key)
			require.NoError(t, err, "after the grace period its agent does not matter")
			require.Equal(t, verdict.Delete, f.Verdict.Action)
		})
	}
}

// TestShimIsConfirmedByTheEndOfItsAgent: its anchor exists, and however long it has been without a container, its agent has to be gone.
func TestShimIsConfirmedByTheEndOfItsAgent(t *testing.T) {
	id := identity.ShimID("1")
	key := observe.Key{ID: id, Remnant: true, Kind: verdict.Shim}
	w := synced(t)
	w.alive(agentA)
	w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: id, Part: ctrd.PartShim, Owner: agentA}} })
	require.NoError(t, w.Scan(t.Context()))
	w.change(func(w *testEnv) { w.containers[id] = observe.Container{ID: id, State: verdict.Running} }) // List returns those of sandboxes alone
	require.Equal(t, verdict.ShimOfAgent, w.verdicts(t)[id+" shim"])
	w.clock.Step(2 * leftover)
	f, err := w.Confirm(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, verdict.ShimOfAgent, f.Verdict.Reason, "the API server has the Pod")
	w.change(func(w *testEnv) { w.fail["pods"] = errors.New("connection refused") })
	_, err = w.Confirm(t.Context(), key)
	require.ErrorContains(t, err, "connection refused", "no evidence")
	w.RemovePod(agentA)
	w.change(func(w *testEnv) { delete(w.pods, agentA); delete(w.fail, "pods"); w.fail["get"] = errors.New("broken") })
	_, err = w.Confirm(t.Context(), key)
	require.ErrorContains(t, err, "broken", "no evidence either")
	w.change(func(w *testEnv) { delete(w.fail, "get") })
	f, err = w.Confirm(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, verdict.Delete, f.Verdict.Action)
}

// TestEndOfAnAgentCausesAScan: what it left without a container is found at once, and not by the next regular scan.
func TestEndOfAnAgentCausesAScan(t *testing.T) {
	w := newTestEnv(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	w.alive(agentA)
	w.alive("pod-of-others")
	w.change(func(w *testEnv) { w.containers[idOne] = one(w) })
	w.SetSynced()
	go func() { ended <- w.Run(ctx) }()
	defer func() {
		cancel()
		require.NoError(t, <-ended)
	}()
	scans := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(slices.DeleteFunc(slices.Clone(w.asked), func(what string) bool { return what != "list" }))
	}
	w.stepUntil(t, func() bool { return scans() >= 2 }, 10*time.Millisecond) // at the start, and when the stream was established
	before, began := scans(), w.clock.Now()
	w.RemovePod("pod-of-others")
	w.change(func(w *testEnv) { w.pieces = []ctrd.Piece{{ID: "1" + idOne[1:], Part: ctrd.PartBundle, Owner: agentA}} })
	w.RemovePod(agentA)
	found := observe.Key{ID: "1" + idOne[1:], Remnant: true, Kind: verdict.Bundle}
	var reported []observe.Key
	w.stepUntil(t, func() bool { reported = append(reported, w.reported()...); return slices.Contains(reported, found) }, 10*time.Millisecond)
	require.Less(t, w.clock.Since(began), interval/2, "before the next regular scan")
	require.Equal(t, before+1, scans(), "one scan, and none for a Pod that nothing on the node names")
}
