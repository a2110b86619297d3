package rpc_test

import (
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/stretchr/testify/require"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

var emptyIsNil gocmp.Option = cmpopts.EquateEmpty()

func verdictSlot() identity.Identity {
	return identity.Identity{AgentUID: "agent", Pool: "pool", State: identity.StateSlot}
}

func watch(t *testing.T, client janitorv1.JanitorServiceClient, req *janitorv1.WatchVerdictsRequest) func() string {
	t.Helper()
	stream, err := client.WatchVerdicts(t.Context(), req)
	require.NoError(t, err)
	return func() string {
		m, err := stream.Recv()
		require.NoError(t, err)
		line := strings.TrimPrefix(m.GetType().String(), "TYPE_")
		if v := m.GetVerdict(); v != nil {
			line += " " + v.GetContainerId() + " " + strings.TrimPrefix(v.GetReason().String(), "REASON_")
		}
		return line
	}
}

func TestWatchVerdicts(t *testing.T) {
	c := newCore(judged(claimed("b")), judged(claimed("a")))
	client := serve(t, c, nil)
	next := watch(t, client, &janitorv1.WatchVerdictsRequest{})
	deletions := watch(t, client, &janitorv1.WatchVerdictsRequest{Actions: []janitorv1.Action{janitorv1.Action_ACTION_DELETE}})
	for _, want := range []string{"VERDICT a ASSIGNED", "VERDICT b ASSIGNED", "SYNCED"} {
		require.Equal(t, want, next())
	}
	require.Equal(t, "SYNCED", deletions())

	// Time alone is no change; a state of the task is one, and so is an assignment.
	older, stopped := claimed("a"), claimed("b")
	older.Age = time.Hour
	stopped.Container = verdict.Stopped
	c.set(nil, judged(older), judged(stopped))
	require.Equal(t, "VERDICT b ASSIGNED", next())
	moved := claimed("a")
	moved.Resource.Assignment = &verdict.Assignment{AgentUID: "other", Attempt: 2}
	remnant := &verdict.Remnant{ContainerID: "b", Kind: verdict.Mount, Since: time.Second}
	c.set(nil, judged(moved), left(remnant))
	for _, want := range []string{"VERDICT a ASSIGNED_ELSEWHERE", "VERDICT b LEFTOVER_YOUNG", "GONE b ASSIGNED"} {
		require.Equal(t, want, next())
	}
	require.Equal(t, "VERDICT a ASSIGNED_ELSEWHERE", deletions())

	old := *remnant
	old.Since = time.Hour
	c.set(nil, judged(claimed("a")), left(&old))
	require.Equal(t, "VERDICT a ASSIGNED", next())
	require.Equal(t, "VERDICT b LEFTOVER", next())
	require.Equal(t, "VERDICT b LEFTOVER", deletions())
	require.Equal(t, "GONE a ASSIGNED_ELSEWHERE", deletions(), "it is no longer selected")
}

func TestWatchEnds(t *testing.T) {
	c, closing := newCore(judged(claimed("a"))), make(chan struct{})
	client := serve(t, c, closing)
	open := func() janitorv1.JanitorService_WatchVerdictsClient {
		stream, err := client.WatchVerdicts(t.Context(), &janitorv1.WatchVerdictsRequest{})
		require.NoError(t, err)
		for range 2 {
			_, err = stream.Recv()
			require.NoError(t, err)
		}
		return stream
	}
	stream := open()
	c.set(fault.New(errdefs.ErrUnavailable, fault.RuntimeUnavailable, "containerd is unavailable"))
	_, err := stream.Recv()
	require.ErrorContains(t, err, "containerd is unavailable")
	c.set(nil, judged(claimed("a")))
	stream = open()
	close(closing)
	_, err = stream.Recv()
	require.ErrorContains(t, err, "stopping")
	require.True(t, errdefs.IsUnavailable(rpc.FromStatus(err)))
}
