package observe_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	recheckInterval = time.Second
	recheckGap      = 50 * time.Millisecond
)

// questions returns how often the API server was asked for a Sandbox.
func (w *testEnv) questions() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, a := range w.asked {
		if a == "sandbox" {
			n++
		}
	}
	return n
}

// TestSandboxWithSameNameNeedsNoGrace: the new one is not assigned yet, so it is in no node's cache. Within about a second the API
// server itself is asked.
func TestSandboxWithSameNameNeedsNoGrace(t *testing.T) {
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.addContainer(t, one(w))
	w.erase(s)
	require.Eventually(t, func() bool { return w.questions() == 1 }, testkit.Timeout, testkit.Tick, "at once")
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	require.Empty(t, w.reported())
	w.change(func(w *testEnv) { w.sandboxes["ns/one"] = sandbox("v", "", 0) })
	began := w.clock.Now()
	w.clock.Step(recheckInterval)
	w.stepUntil(t, func() bool { return len(w.reported()) > 0 }, time.Millisecond)
	require.Less(t, w.clock.Since(began), grace)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.SandboxReplaced, f.Verdict.Reason)
	require.Equal(t, "meta-v", f.ResourceUID)
}

// TestSandboxThatNoCacheShowed, as after a restart of the janitor, is requested after a moment.
func TestSandboxThatNoCacheShowed(t *testing.T) {
	w := start(t)
	w.change(func(w *testEnv) { w.sandboxes["ns/one"] = sandbox("v", "agent-elsewhere", 1) })
	began := w.clock.Now()
	w.addContainer(t, one(w))
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.stepUntil(t, func() bool { return len(w.reported()) > 0 }, 5*time.Millisecond)
	require.GreaterOrEqual(t, w.clock.Since(began), recheckInterval)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
	require.Equal(t, 1, w.questions())
}

// TestSandboxThatReachesTheCacheIsNotRequested: it was just written, and is on its way to the cache.
func TestSandboxThatReachesTheCacheIsNotRequested(t *testing.T) {
	w := start(t)
	w.addContainer(t, one(w))
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.clock.Step(recheckInterval - 1)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.clock.Step(time.Hour)
	require.Equal(t, verdict.Assigned, w.verdict(t))
	w.erase(s)
	require.Eventually(t, func() bool { return w.questions() == 1 }, testkit.Timeout, testkit.Tick, "only for its loss")
}

// TestManyDeletedSandboxesCauseNoBurst of requests.
func TestManyDeletedSandboxesCauseNoBurst(t *testing.T) {
	const many = 40
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	var ids []string
	for i := range many {
		s := s.DeepCopy()
		s.Name = fmt.Sprint(i)
		w.write(s)
		c := one(w)
		c.ID = fmt.Sprintf("%s-%d", uidOne, i)
		c.Identity.Name = s.Name
		w.change(func(w *testEnv) { w.containers[c.ID] = c })
		ids = append(ids, c.ID)
	}
	require.NoError(t, w.Scan(t.Context()))
	began := w.clock.Now()
	for i := range many {
		s := s.DeepCopy()
		s.Name = fmt.Sprint(i)
		w.erase(s)
	}
	w.stepUntil(t, func() bool { return w.questions() >= many }, 5*time.Millisecond)
	require.GreaterOrEqual(t, w.clock.Since(began), (many-1)*recheckGap)
	all := w.verdicts(t)
	for _, id := range ids {
		require.Equal(t, verdict.WithinGrace, all[id])
	}
	require.Empty(t, w.reported())
}

func TestFailedRecheckIsNoAnswer(t *testing.T) {
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.addContainer(t, one(w))
	w.change(func(w *testEnv) {
		w.fail["sandbox"], w.sandboxes["ns/one"] = errors.New("connection refused"), sandbox("v", "", 0)
	})
	w.RemoveSandbox(&s.ObjectMeta)
	require.Eventually(t, func() bool { return w.questions() == 1 }, testkit.Timeout, testkit.Tick)
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	require.Empty(t, w.reported())
	w.change(func(w *testEnv) { delete(w.fail, "sandbox") })
	w.clock.Step(recheckInterval)
	w.stepUntil(t, func() bool { return len(w.reported()) > 0 }, time.Millisecond)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
}

// TestContainerNewerThanItsSandboxIsKept: its own Sandbox is not written yet, or not observed.
func TestContainerNewerThanItsSandboxIsKept(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.write(sandbox("v", agentA, 1))
	w.addContainer(t, one(w, unwritten))
	w.clock.Step(time.Hour)
	require.Equal(t, verdict.NotPersisted, w.verdict(t))
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.NotPersisted, f.Verdict.Reason)
	require.Zero(t, w.questions())

	w.change(func(w *testEnv) { w.sandboxes["ns/one"] = sandbox(uidOne, agentA, 1) })
	w.clock.Step(time.Second)
	w.addContainer(t, one(w))
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t), "according to the cache, which lags")
	require.NotEmpty(t, w.reported())
	f, err = w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.Assigned, f.Verdict.Reason)
}

// TestClockJumps: a container that was created in the future by the node's clock is kept, and not requested again and again; one
// that looks old after a jump still has its grace period.
func TestClockJumps(t *testing.T) {
	w := start(t)
	w.addContainer(t, one(w, func(c *observe.Container) { c.CreatedAt = w.clock.Now().Add(2 * time.Hour) }))
	w.clock.Step(grace)
	w.stepUntil(t, func() bool { return w.questions() > 0 }, 10*time.Millisecond)
	for range 10 {
		w.clock.Step(interval)
		require.Equal(t, verdict.WithinGrace, w.verdict(t))
		require.NoError(t, w.Scan(t.Context()))
	}
	require.Empty(t, w.reported())
	require.Less(t, w.questions(), 15, "once per scan interval")
	w.clock.Step(2*time.Hour + grace)
	require.Eventually(t, func() bool { return len(w.reported()) > 0 }, testkit.Timeout, testkit.Tick, "it is deleted when its time has come")
	require.Equal(t, verdict.SandboxAbsent, w.verdict(t))

	w.addContainer(t, one(w, func(c *observe.Container) { c.ID, c.Identity.SandboxUID = "1"+idOne[1:], "1"+uidOne[1:] }))
	require.Equal(t, verdict.WithinGrace, w.verdicts(t)["1"+idOne[1:]], "an hour old, and missing since now")
}

// TestRemovedDuringSurveyIsNoRemnant: the survey saw what was then removed with its container.
func TestRemovedDuringSurveyIsNoRemnant(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.addContainer(t, one(w))
	key := observe.Key{ID: idOne}
	w.change(func(w *testEnv) {
		w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartSnapshot}}
		w.surveyed = func() {
			w.change(func(w *testEnv) { delete(w.containers, idOne) })
			w.Gone(key)
		}
	})
	require.NoError(t, w.Scan(t.Context()))
	require.Empty(t, w.verdicts(t))
	w.change(func(w *testEnv) { w.surveyed = nil })
	require.NoError(t, w.Scan(t.Context()))
	require.Equal(t, map[string]verdict.Reason{idOne + " snapshot": verdict.LeftoverYoung}, w.verdicts(t), "it still exists")
}
