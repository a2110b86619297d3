package sandbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
)

var other = types.NamespacedName{Namespace: "ns", Name: "other"}

func TestExclusionsExpire(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemory(clock)
	require.Empty(t, m.excluded(name))
	m.exclude(name, "a", time.Minute)
	m.exclude(name, "b", 2*time.Minute)
	require.ElementsMatch(t, []string{"a", "b"}, m.excluded(name))
	require.Empty(t, m.excluded(other))
	clock.Step(time.Minute)
	require.Equal(t, []string{"b"}, m.excluded(name))
	clock.Step(time.Minute)
	require.Empty(t, m.excluded(name))
}

func TestCreateHistory(t *testing.T) {
	m := newMemory(clocktesting.NewFakeClock(start))
	require.Nil(t, m.lastError(name))
	require.Equal(t, 1, m.createFailed(name))
	require.Equal(t, 2, m.createFailed(name))
	m.setLastError(name, cause{"ImagePullFailed", "no route"})
	require.Equal(t, "ImagePullFailed", m.lastError(name).reason)
	m.exclude(name, "a", time.Minute)
	require.Equal(t, 1, m.createFailed(name), "failures are counted for each agent")
	m.createSucceeded(name)
	require.Nil(t, m.lastError(name))
	require.Empty(t, m.excluded(name))
}

func TestAgentSilence(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemory(clock)
	require.Zero(t, m.agentSilent(name))
	clock.Step(3 * time.Second)
	require.Equal(t, 3*time.Second, m.agentSilent(name))
	m.agentAnswered(name)
	require.Zero(t, m.agentSilent(name))
}

func TestStaleVersions(t *testing.T) {
	m := newMemory(clocktesting.NewFakeClock(start))
	require.False(t, m.stale(name, "1"))
	m.overwritten(name, "1")
	m.overwritten(name, "2")
	require.True(t, m.stale(name, "2"))
	require.True(t, m.stale(name, "1"))
	require.False(t, m.stale(other, "1"))
	require.False(t, m.stale(name, "3"), "the cache has caught up")
	require.False(t, m.stale(name, "1"), "and does not fall behind again")
}

func TestForget(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	m := newMemory(clock)
	for _, n := range []types.NamespacedName{name, other} {
		m.createFailed(n)
		m.agentSilent(n)
		m.overwritten(n, "1")
		m.holds.update(n, func(h *hold) { h.SandboxUID = "uid" })
	}
	clock.Step(time.Second)
	m.forget(name)
	require.Zero(t, m.agentSilent(name))
	require.False(t, m.stale(name, "1"))
	require.Zero(t, m.holds.get(name))
	require.Equal(t, 1, m.createFailed(name))
	require.Equal(t, time.Second, m.agentSilent(other))
	require.True(t, m.stale(other, "1"))
	require.Equal(t, "uid", m.holds.get(other).SandboxUID)
	require.Equal(t, 2, m.createFailed(other))
}
