//go:build integration

package app_test

import (
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// TestExactlyTheOrphansAreRemoved is the janitor's proof: real containers, half of them orphans of all kinds and half of them not;
// the API server is killed and unavailable in the middle; the janitor's program is killed again and again. In the end exactly the
// orphans are removed with everything that belonged to them, and the others were not disturbed. Its size:
//
//	FSB_JANITOR_CONTAINERS=300 FSB_JANITOR_OUTAGE=60 FSB_JANITOR_KILLS=20   (the last but one in seconds); FSB_JANITOR_SEED
func TestExactlyTheOrphansAreRemoved(t *testing.T) {
	total, kills := number(t, "FSB_JANITOR_CONTAINERS", 60), number(t, "FSB_JANITOR_KILLS", 5)
	outage, seed := time.Duration(number(t, "FSB_JANITOR_OUTAGE", 5))*time.Second, number(t, "FSB_JANITOR_SEED", 1)
	w := newTestEnv(t)
	m := w.fixtures()
	foreign := w.container("the-agent-of-another-"+uuid.NewString(), map[string]string{"io.kubernetes.pod.uid": foreignAgent}, verdict.Running)
	began := time.Now()
	at := func() time.Duration { return time.Since(began).Round(100 * time.Millisecond) }
	for n := range total / 2 {
		m.keep(n)
		m.orphan(n, n/15%2)
	}
	t.Logf("%s: %d containers and remnants were made, %d of them to become orphans; seed %d", at(), total, len(m.orphans), seed)
	began = time.Now()
	m.fall(0)
	first := len(m.remaining())
	var away atomic.Bool
	var died [2]atomic.Int32
	mean := func() time.Duration { // a third of the kills happen during the outage
		if away.Load() {
			return 3 * outage / time.Duration(max(kills, 1))
		}
		return 700 * time.Millisecond
	}
	l := w.live(uint64(seed), kills, mean, func(n int, lived time.Duration) {
		where := map[bool]int{false: 0, true: 1}[away.Load()]
		died[where].Add(1)
		t.Logf("%s: killed the janitor for the %d. time, after %s; API server away: %t", at(), n, lived.Round(time.Millisecond), away.Load())
	}, "--grace=1s", "--leftover-grace=2s", "--scan-interval=1s")
	m.eventually(func() bool { return len(m.remaining()) <= first*5/6 })
	t.Logf("%s: %d of %d orphans are left, and the others fall", at(), len(m.remaining()), first)
	m.fall(1)
	w.killAPI()
	away.Store(true)
	m.runWithoutAPI(l, outage)
	w.startAPI()
	away.Store(false)
	t.Logf("%s: the API server is back after %s; of %d orphans something is left", at(), outage, len(m.remaining()))
	m.eventually(func() bool { return len(m.remaining()) == 0 })
	t.Logf("%s: nothing is left of any orphan", at())
	// The last kills may come after the last orphan.
	require.True(t, eventually(4*testkit.Timeout, 100*time.Millisecond, func() bool { return int(died[0].Load()+died[1].Load()) >= kills }))
	m.requireVerdicts(l)
	l.end()
	t.Logf("%s: the janitor was killed %d times while the API server was there, %d times while it was not", at(), died[0].Load(), died[1].Load())
	m.requireUntouched()
	want := []string{foreign.id}
	for _, s := range m.kept {
		want = append(want, s.id)
	}
	slices.Sort(want)
	require.Equal(t, want, m.records(), "exactly the orphans are removed")
	for what := range w.left() {
		require.True(t, slices.ContainsFunc(want, func(id string) bool { return what[len(what)-min(len(id), len(what)):] == id }), "%s is left", what)
	}
	t.Logf("%s: all %d others are there, each in the process in which it was", at(), len(m.kept))
	left := []thing{foreign}
	for _, s := range m.kept {
		left = append(left, s.thing)
	}
	w.sweepAway(left)
}

// runWithoutAPI lets time pass. The janitor that has synced is killed; its successors know nothing, and remove no container.
func (m *fixtures) runWithoutAPI(l *mortal, outage time.Duration) {
	m.t.Helper()
	over := time.After(outage)
	l.kill()
	before := m.records()
	require.Eventually(m.t, func() bool { // its last calls to containerd are done
		now := m.records()
		same := slices.Equal(before, now)
		before = now
		return same
	}, testkit.Timeout, 200*time.Millisecond)
	<-over
	require.Equal(m.t, before, m.records(), "containers were removed without evidence")
}

// eventually waits for a condition that is slow to check.
func (m *fixtures) eventually(condition func() bool) {
	m.t.Helper()
	if !eventually(4*testkit.Timeout, 100*time.Millisecond, condition) {
		m.t.Fatalf("what is left: %v", m.remaining())
	}
}

func eventually(limit, every time.Duration, condition func() bool) bool {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); <-ticker.C {
		if condition() {
			return true
		}
	}
	return condition()
}

// requireVerdicts waits until the present janitor reports the expected reason for each kept container, and no other orphan.
func (m *fixtures) requireVerdicts(l *mortal) {
	m.t.Helper()
	j := l.client(m.t)
	defer j.stop()
	wrong := map[string]string{}
	ok := eventually(testkit.Timeout, 100*time.Millisecond, func() bool {
		got := j.verdicts(m.t)
		clear(wrong)
		for _, s := range m.kept {
			if s.reason != janitorv1.Reason_REASON_UNSPECIFIED && got[s.id] != s.reason {
				wrong[s.kind] = got[s.id].String()
			}
		}
		return len(wrong) == 0
	})
	require.True(m.t, ok, "%v", maps.Clone(wrong))
}
