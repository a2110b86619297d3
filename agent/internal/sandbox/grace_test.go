package sandbox_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// newGraceEnv returns an agent with a sandbox that traps SIGTERM and runs on. The test runs in a bubble, where time passes only
// when nothing else can happen.
func newGraceEnv(t *testing.T) *testEnv {
	t.Helper()
	env := newEnv(t, nil)
	env.mustCreate(t, record("u", 1, command("trap", "linger"), grace(30*time.Second)))
	return env
}

// startDelete makes a delete call and waits until it has sent SIGTERM, or, in a repeated call, has joined. grace nil: the
// call sets none.
func (env *testEnv) startDelete(t *testing.T, grace *durationpb.Duration) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	_, err := env.Delete(ctx, &agentv1.DeleteSandboxRequest{Fence: record("u", 1).GetFence(), GracePeriod: grace}, func(s agentv1.DeleteStage) {
		if s == termSent {
			leave()
		}
	})
	require.ErrorIs(t, err, context.Canceled)
}

// requireKilledAt waits until just before a time since SIGTERM, when the process still runs, and then until it.
func (env *testEnv) requireKilledAt(t *testing.T, elapsed, at time.Duration) {
	t.Helper()
	if at > elapsed {
		<-time.After(at - elapsed - time.Millisecond)
		synctest.Wait()
		require.Equal(t, stateTerminating, env.state("u"), "it still has its grace period")
		require.Equal(t, []string{"u-1"}, env.runtime.IDs())
		<-time.After(time.Millisecond)
	}
	synctest.Wait()
	require.Empty(t, env.reports())
}

func TestGracePeriod(t *testing.T) {
	seconds := func(n int) *durationpb.Duration { return durationpb.New(time.Duration(n) * time.Second) }
	for _, c := range []struct {
		name string
		// first and second are the grace periods of two calls, 5 s apart.
		first, second *durationpb.Duration
		killedAt      time.Duration
	}{
		{"the sandbox's own", nil, nil, 30 * time.Second},
		{"longer than the sandbox's own", seconds(60), nil, 60 * time.Second},
		{"shorter than the sandbox's own", seconds(10), nil, 10 * time.Second},
		{"made longer", seconds(10), seconds(60), 60 * time.Second},
		{"made shorter", seconds(60), seconds(10), 10 * time.Second},
		{"the sandbox's own made longer", nil, seconds(60), 60 * time.Second},
		{"shorter than the time that has passed", seconds(60), seconds(3), 5 * time.Second},
		{"zero", seconds(60), seconds(0), 5 * time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				env := newGraceEnv(t)
				env.startDelete(t, c.first)
				<-time.After(5 * time.Second)
				env.startDelete(t, c.second)
				env.requireKilledAt(t, 5*time.Second, c.killedAt)
			})
		})
	}
}

// TestGracePeriodSurvivesRestart: the tombstone keeps the grace period of the last call that set one.
func TestGracePeriodSurvivesRestart(t *testing.T) { synctest.Test(t, testGracePeriodSurvivesRestart) }

func testGracePeriodSurvivesRestart(t *testing.T) {
	rt, root := newRuntime(), t.TempDir()
	start := func() *testEnv {
		env := boot(t, rt, root, nil)
		require.NoError(t, env.Adopt(t.Context()))
		env.SetAccepting(true, "")
		return env
	}
	env := start()
	env.mustCreate(t, record("u", 1, command("trap", "linger"), grace(time.Second)))
	left, leave := context.WithCancel(t.Context())
	leave()
	for _, override := range []*durationpb.Duration{durationpb.New(5 * time.Second), durationpb.New(time.Minute), nil} {
		_, err := env.Delete(left, &agentv1.DeleteSandboxRequest{
			Fence: record("u", 1).GetFence(), GracePeriod: override, Tombstone: tombstoneOf("u", 1),
		}, func(agentv1.DeleteStage) {})
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, env.Close(t.Context()))

	env = start()
	require.Equal(t, stateTerminating, env.state("u"))
	require.Equal(t, time.Minute, env.status.Snapshot().GetTombstones()[0].GetGracePeriod().AsDuration())
	env.startDelete(t, nil)
	env.requireKilledAt(t, 0, time.Minute)
}
