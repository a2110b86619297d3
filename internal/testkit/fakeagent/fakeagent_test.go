package fakeagent_test

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/agentconformance"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestConformance(t *testing.T) {
	agentconformance.Run(t, func(t *testing.T) *agentconformance.Agent {
		agent := fakeagent.New(&agentv1.AgentInfo{PodUid: "me", PodIp: "10.0.0.1", Capacity: 2}, "docker.io/library/busybox:1")
		pipe := bufconn.Listen(1 << 20)
		ctx, cancel := context.WithCancel(context.Background())
		var serving sync.WaitGroup
		serving.Go(func() { _ = agent.Serve(ctx, pipe, rpc.TLS{Insecure: true}) })
		conn, err := rpc.Dial("passthrough:///agent", rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }),
		}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, conn.Close()); cancel(); serving.Wait() })
		return &agentconformance.Agent{
			Client: agentv1.NewAgentServiceClient(conn), UID: "me", Image: "busybox:1", Remote: "remote:1",
			End: func(uid string) { agent.Stop(uid, 0) },
		}
	})
}
