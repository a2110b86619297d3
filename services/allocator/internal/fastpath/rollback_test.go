package fastpath_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// An API server that has just started refuses every user until it has read its roles; callers see it as unavailable.
func TestAPIServerWithoutRoles(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	m.api.starting.Store(true)
	_, err := m.create(request("two"))
	require.NoError(t, err)
	fresh := request("three")
	fresh.Spec.Pool = "unknown"
	_, err = m.create(fresh)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
	require.ErrorContains(t, err, "roles", "should it last")
	require.NoError(t, m.remove("one"), "the agent remembers it")
	require.Len(t, a.Tombstones(), 1)
	m.api.starting.Store(false)
	m.eventually("both have landed", func() bool { return m.resource("one") == nil && m.resource("two") != nil })
}
