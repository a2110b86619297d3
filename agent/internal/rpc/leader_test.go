package rpc_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/runtime/fake"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

func under(ctx context.Context, term int64) context.Context {
	return metadata.AppendToOutgoingContext(ctx, rpc.TermKey, strconv.FormatInt(term, 10))
}

// TestAnnounceLeaderCancelsOlderCreates is the takeover as the new leader sees it: once its call is answered, what the old
// leader had begun is undone.
func TestAnnounceLeaderCancelsOlderCreates(t *testing.T) {
	env := serve(t)
	reached := make(chan struct{})
	env.runtime.Hook(func(ctx context.Context, op fake.Op, _ string) error {
		if op != fake.OpStart {
			return nil
		}
		close(reached)
		<-ctx.Done()
		return ctx.Err()
	})
	create, err := env.CreateSandbox(under(t.Context(), 4), &agentv1.CreateSandboxRequest{Record: record("u")})
	require.NoError(t, err)
	<-reached
	_, err = env.AnnounceLeader(under(t.Context(), 5), &agentv1.AnnounceLeaderRequest{})
	require.NoError(t, err)
	_, err = drain(t, create)
	require.Equal(t, fault.LeaderSuperseded, fault.ReasonOf(err), "%v", err)
	require.Empty(t, env.runtime.IDs())
	for _, ctx := range []context.Context{t.Context(), under(t.Context(), 4)} {
		_, err = env.AnnounceLeader(ctx, &agentv1.AnnounceLeaderRequest{})
		require.Equal(t, fault.LeaderSuperseded, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
		_, err = env.Drain(ctx, &agentv1.DrainRequest{AgentUid: "me"})
		require.Equal(t, fault.LeaderSuperseded, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
	}
}

func TestDrainAndTombstonesOnTheWire(t *testing.T) {
	env := serve(t)
	create, err := env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: record("u")})
	require.NoError(t, err)
	_, err = drain(t, create)
	require.NoError(t, err)
	drained, err := env.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: "me"})
	require.NoError(t, err)
	require.Equal(t, int32(1), drained.GetSandboxes())
	create, err = env.CreateSandbox(t.Context(), &agentv1.CreateSandboxRequest{Record: record("v")})
	require.NoError(t, err)
	_, err = drain(t, create)
	require.Equal(t, fault.AgentDraining, fault.ReasonOf(err), "%v", err)

	fence := record("u").GetFence()
	deletion, err := env.DeleteSandbox(t.Context(), &agentv1.DeleteSandboxRequest{
		Fence: fence, GracePeriod: durationpb.New(0), Tombstone: &agentv1.Tombstone{Fence: fence, Namespace: "default", Name: "sb"},
	})
	require.NoError(t, err)
	_, err = drain(t, deletion)
	require.NoError(t, err)
	snapshot := func() *agentv1.AgentSnapshot {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		stream, err := env.WatchStatus(ctx, &agentv1.WatchStatusRequest{})
		require.NoError(t, err)
		m, err := stream.Recv()
		require.NoError(t, err)
		return m.GetSnapshot()
	}
	s := snapshot()
	require.Equal(t, "u", s.GetTombstones()[0].GetFence().GetSandboxUid())
	require.Equal(t, "Draining", s.GetNotAcceptingReason())
	_, err = env.ForgetTombstone(t.Context(), &agentv1.ForgetTombstoneRequest{Fence: fence})
	require.NoError(t, err)
	drained, err = env.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: "me", Resume: true})
	require.NoError(t, err)
	require.Zero(t, drained.GetSandboxes())
	s = snapshot()
	require.Empty(t, s.GetTombstones())
	require.True(t, s.GetAccepting())
}
