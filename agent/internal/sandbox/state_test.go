package sandbox

import (
	"testing"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// TestNext tries every event in every state.
func TestNext(t *testing.T) {
	type move struct {
		from agentv1.SandboxState
		on   event
	}
	moves := map[move]agentv1.SandboxState{
		{stateCreating, eventStarted}: stateRunning,
		{stateCreating, eventFailed}:  stateFailed,
		{stateCreating, eventDelete}:  stateTerminating,

		{stateRunning, eventEnded}:  stateStopped,
		{stateRunning, eventDelete}: stateTerminating,

		{stateStopped, eventDelete}: stateTerminating,

		{stateFailed, eventDelete}:  stateTerminating,
		{stateFailed, eventRemoved}: stateTerminated,

		{stateTerminating, eventFailed}:  stateTerminating,
		{stateTerminating, eventEnded}:   stateTerminating,
		{stateTerminating, eventDelete}:  stateTerminating,
		{stateTerminating, eventRemoved}: stateTerminated,
	}
	for number, name := range agentv1.SandboxState_name {
		for on := eventStarted; on <= eventRemoved; on++ {
			from := agentv1.SandboxState(number)
			want, allowed := moves[move{from, on}]
			got, ok := next(from, on)
			require.Equal(t, allowed, ok, "%s on event %d", name, on)
			if !allowed {
				want = from
			}
			require.Equal(t, want, got, "%s on event %d", name, on)
		}
	}
}
