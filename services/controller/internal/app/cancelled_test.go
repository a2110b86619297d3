//go:build integration

package app_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

const (
	stateFailed     = agentv1.SandboxState_SANDBOX_STATE_FAILED
	stateTerminated = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
)

// dies has the controller die while an agent creates a sandbox for it, and the agent report what came of that.
func (w *world) dies(a *agent, state agentv1.SandboxState, reason fault.Reason) {
	w.t.Helper()
	a.set(func(a *agent) { a.gate = make(chan struct{}) })
	w.start()
	w.sandbox("s")
	w.reachesPhase("s", v1alpha1.PhaseBound)
	w.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "not asked for" })
	record := a.createCalls()[0].GetRecord()
	w.stop()
	a.put(&agentv1.SandboxReport{Record: record, State: state, Reason: string(reason), Message: "the create was cancelled"})
	a.set(func(a *agent) { a.gate = nil })
}

// TestCreateThatADeadControllerLeftBehind: the agent cancelled it, which is nobody's fault, and it is done again. Nor does
// the Registry's memory of the first try, which here lasts for good, end the second.
func TestCreateThatADeadControllerLeftBehind(t *testing.T) {
	for name, left := range map[string]struct {
		state  agentv1.SandboxState
		reason fault.Reason
	}{
		"cancelled":    {stateFailed, fault.Cancelled},
		"superseded":   {stateFailed, fault.LeaderSuperseded},
		"no reason":    {stateFailed, ""},
		"nothing left": {stateTerminated, fault.Cancelled},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			a := w.agentFor("a")
			w.dies(a, left.state, left.reason)
			a.set(func(a *agent) { a.mute = true })
			w.start()
			s := w.reaches("s", "an end", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning || s.Status.Phase == v1alpha1.PhaseFailed
			})
			require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
			require.Equal(t, int64(1), s.Status.Attempt)
			w.stays(time.Second, "the first try ended the second", func() bool { return w.get("s").Status.Phase == v1alpha1.PhaseRunning })
		})
	}
}

// TestCreateThatTheAgentTookBack goes elsewhere, under another attempt.
func TestCreateThatTheAgentTookBack(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.dies(a, stateFailed, fault.SandboxTerminating)
	b := w.agentFor("b")
	w.start()
	s := w.reachesPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, b.info.GetPodName(), s.Status.AssignedPod)
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Empty(t, a.all())
}

// TestFailureThatADeadControllerLeftBehind is the request's own: it fails, and is not tried again.
func TestFailureThatADeadControllerLeftBehind(t *testing.T) {
	w := newWorld(t)
	a := w.agentFor("a")
	w.dies(a, stateFailed, fault.ImageNotFound)
	w.start()
	s := w.reachesPhase("s", v1alpha1.PhaseFailed)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.createCalls(), 1)
	w.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "something is left" })
}
