package observe_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

const (
	askInterval = time.Second
	askGap      = 50 * time.Millisecond
)

// questions is how often the API server was asked for a Sandbox.
func (w *world) questions() int {
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

// TestAnotherSandboxOfTheNameIsNotWaitedFor, though nobody has assigned it yet, so that it is in no node's cache: within about
// a second the API server itself has said that it is there.
func TestAnotherSandboxOfTheNameIsNotWaitedFor(t *testing.T) {
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.place(t, one(w))
	w.erase(s)
	require.Eventually(t, func() bool { return w.questions() == 1 }, patience, tick, "at once")
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	require.Empty(t, w.told())
	w.change(func(w *world) { w.sandboxes["ns/one"] = sandbox("v", "", 0) })
	began := w.clock.Now()
	w.clock.Step(askInterval)
	w.stepUntil(t, func() bool { return len(w.told()) > 0 }, time.Millisecond)
	require.Less(t, w.clock.Since(began), grace)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.SandboxReplaced, f.Verdict.Reason)
	require.Equal(t, "meta-v", f.ResourceUID)
}

// TestASandboxThatNoCacheEverShowed, as for a janitor that was away when it was replaced, is asked for after a moment.
func TestASandboxThatNoCacheEverShowed(t *testing.T) {
	w := start(t)
	w.change(func(w *world) { w.sandboxes["ns/one"] = sandbox("v", "agent-elsewhere", 1) })
	began := w.clock.Now()
	w.place(t, one(w))
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.stepUntil(t, func() bool { return len(w.told()) > 0 }, 5*time.Millisecond)
	require.GreaterOrEqual(t, w.clock.Since(began), askInterval)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
	require.Equal(t, 1, w.questions())
}

// TestASandboxThatComesByItselfIsNotAskedFor: a create's Sandbox was written a moment ago and is on its way to the cache.
func TestASandboxThatComesByItselfIsNotAskedFor(t *testing.T) {
	w := start(t)
	w.place(t, one(w))
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	w.clock.Step(askInterval - 1)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.clock.Step(time.Hour)
	require.Equal(t, verdict.Assigned, w.verdict(t))
	w.erase(s)
	require.Eventually(t, func() bool { return w.questions() == 1 }, patience, tick, "for its loss alone")
}

// TestManySandboxesThatGoAtOnceAreNoFlood of questions.
func TestManySandboxesThatGoAtOnceAreNoFlood(t *testing.T) {
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
		w.change(func(w *world) { w.containers[c.ID] = c })
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
	require.GreaterOrEqual(t, w.clock.Since(began), (many-1)*askGap)
	all := w.verdicts(t)
	for _, id := range ids {
		require.Equal(t, verdict.WithinGrace, all[id])
	}
	require.Empty(t, w.told())
}

func TestAQuestionThatFailsIsNoAnswer(t *testing.T) {
	w := start(t)
	s := sandbox(uidOne, agentA, 1)
	w.write(s)
	w.place(t, one(w))
	w.change(func(w *world) {
		w.fail["sandbox"], w.sandboxes["ns/one"] = errors.New("connection refused"), sandbox("v", "", 0)
	})
	w.RemoveSandbox(&s.ObjectMeta)
	require.Eventually(t, func() bool { return w.questions() == 1 }, patience, tick)
	require.Equal(t, verdict.WithinGrace, w.verdict(t))
	require.Empty(t, w.told())
	w.change(func(w *world) { delete(w.fail, "sandbox") })
	w.clock.Step(askInterval)
	w.stepUntil(t, func() bool { return len(w.told()) > 0 }, time.Millisecond)
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t))
}

// TestAContainerThatIsNewerThanTheSandboxThatIsSeen is kept: its own is not written yet, or not seen.
func TestAContainerThatIsNewerThanTheSandboxThatIsSeen(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.write(sandbox("v", agentA, 1))
	w.place(t, one(w, unwritten))
	w.clock.Step(time.Hour)
	require.Equal(t, verdict.NotPersisted, w.verdict(t))
	f, err := w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.NotPersisted, f.Verdict.Reason)
	require.Zero(t, w.questions())

	w.change(func(w *world) { w.sandboxes["ns/one"] = sandbox(uidOne, agentA, 1) })
	w.clock.Step(time.Second)
	w.place(t, one(w))
	require.Equal(t, verdict.SandboxReplaced, w.verdict(t), "by the cache, which is behind")
	require.NotEmpty(t, w.told())
	f, err = w.Confirm(t.Context(), observe.Key{ID: idOne})
	require.NoError(t, err)
	require.Equal(t, verdict.Assigned, f.Verdict.Reason)
}

// TestTheClockJumps: a container that by the node's clock is not made yet is kept, and not asked for again and again; one that
// looks old by a jump has its grace all the same.
func TestTheClockJumps(t *testing.T) {
	w := start(t)
	w.place(t, one(w, func(c *observe.Container) { c.CreatedAt = w.clock.Now().Add(2 * time.Hour) }))
	w.clock.Step(grace)
	w.stepUntil(t, func() bool { return w.questions() > 0 }, 10*time.Millisecond)
	for range 10 {
		w.clock.Step(interval)
		require.Equal(t, verdict.WithinGrace, w.verdict(t))
		require.NoError(t, w.Scan(t.Context()))
	}
	require.Empty(t, w.told())
	require.Less(t, w.questions(), 15, "once in a scan's time")
	w.clock.Step(2*time.Hour + grace)
	require.Eventually(t, func() bool { return len(w.told()) > 0 }, patience, tick, "it goes when its time has come")
	require.Equal(t, verdict.SandboxAbsent, w.verdict(t))

	w.place(t, one(w, func(c *observe.Container) { c.ID, c.Identity.SandboxUID = "1"+idOne[1:], "1"+uidOne[1:] }))
	require.Equal(t, verdict.WithinGrace, w.verdicts(t)["1"+idOne[1:]], "an hour old, and missing since now")
}

// TestWhatIsRemovedWhileASurveyRunsIsNoLeftover: the survey saw what went with its container.
func TestWhatIsRemovedWhileASurveyRunsIsNoLeftover(t *testing.T) {
	w := synced(t)
	w.alive(agentA)
	w.place(t, one(w))
	key := observe.Key{ID: idOne}
	w.change(func(w *world) {
		w.pieces = []ctrd.Piece{{ID: idOne, Part: ctrd.PartSnapshot}}
		w.surveyed = func() {
			w.change(func(w *world) { delete(w.containers, idOne) })
			w.Gone(key)
		}
	})
	require.NoError(t, w.Scan(t.Context()))
	require.Empty(t, w.verdicts(t))
	w.change(func(w *world) { w.surveyed = nil })
	require.NoError(t, w.Scan(t.Context()))
	require.Equal(t, map[string]verdict.Reason{idOne + " snapshot": verdict.LeftoverYoung}, w.verdicts(t), "it is there still")
}
