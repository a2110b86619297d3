package leadership_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
)

func TestIdentity(t *testing.T) {
	for _, address := range []string{"10.1.2.3:9090", "[fd00::1]:9090", "allocator-0.example:1"} {
		a, b := leadership.NewIdentity("allocator-7d9f-x2", address), leadership.NewIdentity("allocator-7d9f-x2", address)
		require.NotEqual(t, a, b, "two runs of a process have different identities")
		back, err := leadership.ParseIdentity(a.String())
		require.NoError(t, err)
		require.Equal(t, a, back)
	}
	for _, bad := range []string{"", "pod", "pod_10.0.0.1_x", "pod_:1_x", "pod_10.0.0.1:_x", "pod_10.0.0.1:1_", "a_b_10.0.0.1:1_x"} {
		_, err := leadership.ParseIdentity(bad)
		require.Error(t, err, bad)
	}
}

// elector returns a fixed state.
type elector struct {
	state      leader.State
	superseded int64
}

func (e *elector) State() (leader.State, <-chan struct{}) { return e.state, nil }
func (e *elector) Superseded(term int64)                  { e.superseded = term }
func (e *elector) Confirm(context.Context) (bool, error)  { return e.state.Term > 0, nil }

func TestState(t *testing.T) {
	self, other := leadership.NewIdentity("a", "10.0.0.1:9090"), leadership.NewIdentity("b", "10.0.0.2:9090")
	tests := map[string]struct {
		in   leader.State
		want leadership.State
	}{
		"no holder":                   {leader.State{}, leadership.State{}},
		"leading":                     {leader.State{Term: 3, Holder: self.String()}, leadership.State{Leads: true, Term: 3}},
		"suspended":                   {leader.State{Holder: self.String()}, leadership.State{}},
		"another":                     {leader.State{Holder: other.String()}, leadership.State{Address: "10.0.0.2:9090", Holder: other.String()}},
		"leadership lost":             {leader.State{Holder: other.String(), Lost: true}, leadership.State{Address: "10.0.0.2:9090", Holder: other.String()}},
		"a holder of another program": {leader.State{Holder: "another-program"}, leadership.State{}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			e := &elector{state: test.in}
			l := leadership.New(e, self)
			got, _ := l.State()
			require.Equal(t, test.want, got)
			require.Equal(t, test.want.Term, l.Term())
			require.Equal(t, test.want.Leads, l.Leads())
			sure, err := l.Confirm(t.Context())
			require.NoError(t, err)
			require.Equal(t, test.want.Leads, sure)
			l.Superseded(9)
			require.EqualValues(t, 9, e.superseded)
		})
	}
	alone := leadership.Alone()
	require.True(t, alone.Leads())
	require.Zero(t, alone.Term(), "calls of an allocator that runs alone carry no term")
	sure, err := alone.Confirm(t.Context())
	require.NoError(t, err)
	require.True(t, sure)
	alone.Superseded(1)
	require.True(t, alone.Leads())
}

func TestReplaces(t *testing.T) {
	own := leadership.NewIdentity("pod", "10.0.0.1:9090")
	for holder, want := range map[string]bool{
		leadership.NewIdentity("pod", "10.0.0.1:9090").String(): true,
		own.String(): false,
		leadership.NewIdentity("other", "10.0.0.1:9090").String(): false,
		leadership.NewIdentity("pod", "10.0.0.2:9090").String():   false,
		leadership.NewIdentity("pod", "10.0.0.1:9091").String():   false,
		"pod": false,
		"":    false,
	} {
		require.Equal(t, want, own.Replaces(holder), holder)
	}
}
