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

// killWhileCreating stops the controller while an agent creates a sandbox, and makes the agent report the state.
func (env *testEnv) killWhileCreating(a *agent, state agentv1.SandboxState, reason fault.Reason) {
	env.t.Helper()
	a.set(func(a *agent) { a.gate = make(chan struct{}) })
	env.start()
	env.sandbox("s")
	env.waitForPhase("s", v1alpha1.PhaseBound)
	env.eventually(func() bool { return len(a.createCalls()) == 1 }, func() string { return "the agent was not called" })
	record := a.createCalls()[0].GetRecord()
	env.stop()
	env.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "the create was not canceled" })
	report := &agentv1.SandboxReport{Record: record, State: state, Reason: string(reason), Message: "the create was canceled"}
	if state == stateTerminated {
		env.allocator.retain(a, report)
	} else {
		a.put(report)
	}
	a.set(func(a *agent) { a.gate = nil })
}

// TestCanceledCreateIsRepeated: the agent canceled the create when the controller stopped. The create is repeated, and the report
// of the first create, which the Registry keeps here, does not end the second one.
func TestCanceledCreateIsRepeated(t *testing.T) {
	for name, left := range map[string]struct {
		state  agentv1.SandboxState
		reason fault.Reason
	}{
		"canceled":     {stateFailed, fault.Cancelled},
		"superseded":   {stateFailed, fault.LeaderSuperseded},
		"no reason":    {stateFailed, ""},
		"nothing left": {stateTerminated, fault.Cancelled},
	} {
		t.Run(name, func(t *testing.T) {
			env := newTestEnv(t)
			a := env.agentFor("a")
			env.killWhileCreating(a, left.state, left.reason)
			a.set(func(a *agent) { a.unreported = true })
			env.start()
			s := env.waitFor("s", "Running or Failed", func(s *v1alpha1.Sandbox) bool {
				return s.Status.Phase == v1alpha1.PhaseRunning || s.Status.Phase == v1alpha1.PhaseFailed
			})
			require.Equal(t, v1alpha1.PhaseRunning, s.Status.Phase)
			require.Equal(t, int64(1), s.Status.Attempt)
			env.consistently(time.Second, "the report of the first create ended the second", func() bool { return env.get("s").Status.Phase == v1alpha1.PhaseRunning })
		})
	}
}

// TestCreateThatWasDeletedMovesOn: the sandbox is created on another agent, as another attempt.
func TestCreateThatWasDeletedMovesOn(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.killWhileCreating(a, stateFailed, fault.SandboxTerminating)
	b := env.agentFor("b")
	env.start()
	s := env.waitForPhase("s", v1alpha1.PhaseRunning)
	require.Equal(t, b.info.GetPodName(), s.Status.AssignedPod)
	require.Equal(t, int64(2), s.Status.Attempt)
	require.Empty(t, a.all())
}

// TestInvalidRequestIsNotRepeated: the request was invalid, so that the sandbox fails.
func TestInvalidRequestIsNotRepeated(t *testing.T) {
	env := newTestEnv(t)
	a := env.agentFor("a")
	env.killWhileCreating(a, stateFailed, fault.ImageNotFound)
	env.start()
	s := env.waitForPhase("s", v1alpha1.PhaseFailed)
	require.Equal(t, int64(1), s.Status.Attempt)
	require.Len(t, a.createCalls(), 1)
	env.eventually(func() bool { return len(a.all()) == 0 }, func() string { return "the container is not removed" })
}
