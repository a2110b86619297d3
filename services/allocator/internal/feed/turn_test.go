package feed_test

import (
	"context"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/feed"
)

// mute is agents that accept streams and send nothing.
type mute struct {
	agentv1.UnimplementedAgentServiceServer
	streams atomic.Int64
}

func (m *mute) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	m.streams.Add(1)
	<-stream.Context().Done()
	return stream.Context().Err()
}

// TestLinksConnectInTurn: some agents are connected to at a time, and those that do not answer do not keep others waiting for long.
func TestLinksConnectInTurn(t *testing.T) {
	const turns, agents = 64, 100
	pipe := bufconn.Listen(1 << 16)
	server, agent := grpc.NewServer(), &mute{}
	agentv1.RegisterAgentServiceServer(server, agent)
	c := clocktesting.NewFakeClock(time.Unix(1000, 0))
	f := feed.New(feed.Config{Sink: &sink{}, Clock: c, Dial: func(*agentv1.AgentInfo, string) (*grpc.ClientConn, error) {
		return grpc.NewClient("passthrough:///agent", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }))
	}})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = server.Serve(pipe) })
	running.Go(func() { _ = f.Run(ctx) })
	defer running.Wait()
	defer server.Stop()
	defer cancel()
	for i := range agents {
		f.SetPod(&agentv1.AgentInfo{PodUid: fmt.Sprint(i)}, fmt.Sprint("agent-", i))
	}
	require.Eventually(t, func() bool { return agent.streams.Load() == turns }, testkit.Timeout, testkit.Tick)
	require.Never(t, func() bool { return agent.streams.Load() > turns }, 10*testkit.Tick, testkit.Tick)
	c.Step(2 * time.Second)
	require.Eventually(t, func() bool { return agent.streams.Load() == agents }, testkit.Timeout, testkit.Tick)
}
