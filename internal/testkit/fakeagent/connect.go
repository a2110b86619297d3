package fakeagent

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// pipeBytes is the size of the buffer of a connection in memory.
const pipeBytes = 1 << 20

// Connect serves the agent in memory until the test ends, and returns a client of it.
func Connect(t testing.TB, a *Agent) agentv1.AgentServiceClient {
	t.Helper()
	pipe := bufconn.Listen(pipeBytes)
	ctx, cancel := context.WithCancel(context.Background())
	var serving sync.WaitGroup
	serving.Go(func() { _ = a.Serve(ctx, pipe, rpc.TLS{Insecure: true}) })
	conn, err := rpc.Dial("passthrough:///agent", rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }),
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()); cancel(); serving.Wait() })
	return agentv1.NewAgentServiceClient(conn)
}
