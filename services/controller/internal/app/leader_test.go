//go:build integration

package app_test

import (
	"errors"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	coordinationv1 "k8s.io/api/coordination/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
)

func (w *world) lease() *coordinationv1.Lease {
	w.t.Helper()
	var l coordinationv1.Lease
	require.NoError(w.t, kube.Get(w.ctx, client.ObjectKey{Namespace: systemNamespace, Name: "fast-sandbox-controller"}, &l))
	return &l
}

// TestCallsCarryTheTerm: agents see the term of the Lease's holder, and a higher one from each that comes after.
func TestCallsCarryTheTerm(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.start()
	w.runs("s", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	first := a.seenTerm()
	require.Positive(t, first)
	require.Equal(t, int64(*w.lease().Spec.LeaseTransitions)+1, first)
	w.stop()
	w.start()
	w.runs("s2", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	require.Greater(t, a.seenTerm(), first)
}

// TestSupersededLeaderBlamesNobody: an agent that knows a higher term, for the Lease was deleted and counts anew, refuses
// every call. The leader takes a higher one; the sandbox neither fails nor goes elsewhere, and a deletion waits.
func TestSupersededLeaderBlamesNobody(t *testing.T) {
	w := newWorld(t)
	a, b := w.agentFor("a"), w.agentFor("b")
	w.start()
	w.runs("old", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	higher := a.seenTerm() + 100
	a.set(func(a *agent) { a.term = higher })
	w.sandbox("s")
	s := w.reachesPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, "a", s.Status.AssignedPod)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Empty(t, b.createCalls())
	require.Greater(t, a.seenTerm(), higher)

	a.set(func(a *agent) { a.term += 100 })
	w.delete("old")
	w.vanishes("old")
	require.Len(t, a.all(), 1)
}

// cut refuses every request while it is on.
type cut struct {
	http.RoundTripper

	on *atomic.Bool
}

// RoundTrip refuses, or does not.
func (c cut) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.on.Load() {
		return nil, errors.New("cut off")
	}
	return c.RoundTripper.RoundTrip(r)
}

// TestStandbyTakesOver: the leader is cut off from the API server, so that it cannot even give the Lease up. It ends, the
// standby leads, under a higher term, and goes on with what was begun.
func TestStandbyTakesOver(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	var on atomic.Bool
	first := w.launch(func(next http.RoundTripper) http.RoundTripper { return cut{next, &on} })
	first.leads()
	second := w.launch(nil)
	w.runs("s", noPorts)
	term := a.seenTerm()
	gate := make(chan struct{})
	a.set(func(a *agent) { a.gate = gate })
	w.sandbox("begun", noPorts)
	w.eventually(func() bool { return len(a.createCalls()) == 2 }, func() string { return "never asked" })
	select {
	case <-second.manager.Elected():
		require.Fail(t, "two lead")
	default:
	}
	on.Store(true)
	w.delete("s")
	second.leads()
	select {
	case <-first.ended:
		require.ErrorContains(t, first.err, "leader election lost")
	case <-time.After(patience):
		require.Fail(t, "the deposed leader goes on")
	}
	w.vanishes("s")
	require.Greater(t, a.seenTerm(), term)
	close(gate)
	s := w.reachesPhase("begun", v1alpha1.PhaseRunning)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.all(), 1)
	require.NoError(t, second.stop())
}
