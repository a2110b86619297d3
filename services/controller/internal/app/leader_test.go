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
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func (env *testEnv) lease() *coordinationv1.Lease {
	env.t.Helper()
	var l coordinationv1.Lease
	require.NoError(env.t, kube.Get(env.ctx, client.ObjectKey{Namespace: systemNamespace, Name: "fast-sandbox-controller"}, &l))
	return &l
}

// TestCallsCarryTheTerm: each leader calls agents with a higher term than the leader before it.
func TestCallsCarryTheTerm(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.start()
	env.runSandbox("s", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	first := a.seenTerm()
	require.Positive(t, first)
	require.Equal(t, int64(*env.lease().Spec.LeaseTransitions)+1, first)
	env.stop()
	env.start()
	env.runSandbox("s2", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	require.Greater(t, a.seenTerm(), first)
}

// TestSupersededLeaderRaisesItsTerm: after the Lease was deleted its terms start again, and an agent that knows a higher one
// refuses every call. The leader raises its term; the sandbox neither fails nor moves to another agent, and a deletion waits.
func TestSupersededLeaderRaisesItsTerm(t *testing.T) {
	env := newTestEnv(t)
	a, b := env.agentFor("a"), env.agentFor("b")
	env.start()
	env.runSandbox("old", func(s *v1alpha1.Sandbox) { s.Spec.ExposedPorts = nil })
	higher := a.seenTerm() + 100
	a.raiseTerm(higher)
	env.sandbox("s")
	s := env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, "a", s.Status.AssignedPod)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Empty(t, b.createCalls())
	require.Greater(t, a.seenTerm(), higher)

	a.raiseTerm(a.seenTerm() + 100)
	env.delete("old")
	env.waitForRemoval("old")
	require.Len(t, a.all(), 1)
}

// cut fails every request while it is on.
type cut struct {
	http.RoundTripper

	on *atomic.Bool
}

// RoundTrip implements http.RoundTripper.
func (c cut) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.on.Load() {
		return nil, errors.New("cut off")
	}
	return c.RoundTripper.RoundTrip(r)
}

// TestStandbyTakesOver: the leader is cut off from the API server, so that it cannot release the Lease. It ends, and the standby
// leads with a higher term and continues what the leader has started.
func TestStandbyTakesOver(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	var on atomic.Bool
	first := env.startProcess(func(next http.RoundTripper) http.RoundTripper { return cut{next, &on} })
	first.waitForLeadership()
	second := env.startProcess(nil)
	env.runSandbox("s", noPorts)
	term := a.seenTerm()
	gate := make(chan struct{})
	a.set(func(a *agent) { a.gate = gate })
	env.sandbox("begun", noPorts)
	env.eventually(func() bool { return len(a.createCalls()) == 2 }, func() string { return "the agent was not called" })
	select {
	case <-second.manager.Elected():
		require.Fail(t, "two processes lead")
	default:
	}
	on.Store(true)
	env.delete("s")
	second.waitForLeadership()
	select {
	case <-first.ended:
		require.ErrorContains(t, first.err, "leader election lost")
	case <-time.After(testkit.Timeout):
		require.Fail(t, "the leader continues without the Lease")
	}
	env.waitForRemoval("s")
	require.Greater(t, a.seenTerm(), term)
	close(gate)
	s := env.waitForPhase("begun", v1alpha1.PhaseRunning)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.all(), 1)
	require.NoError(t, second.stop())
}
