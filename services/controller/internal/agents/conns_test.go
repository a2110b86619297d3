package agents

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	clocktesting "k8s.io/utils/clock/testing"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

const address = "passthrough:///agent:5758"

// connsTo returns connections to one agent, whose uid is "a".
func connsTo(t *testing.T, change ...func(*fakeagent.Agent)) (*Conns, *fakeagent.Agent, *clocktesting.FakeClock) {
	t.Helper()
	agent := fakeagent.New(&agentv1.AgentInfo{PodUid: "a", Capacity: 2})
	for _, c := range change {
		c(agent)
	}
	pipe := bufconn.Listen(1 << 20)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var serving sync.WaitGroup
	serving.Go(func() { _ = agent.Serve(ctx, pipe, rpc.TLS{Insecure: true}) })
	clock := clocktesting.NewFakeClock(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	conns := NewConns(rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }),
	}}, clock)
	t.Cleanup(func() { require.NoError(t, conns.Close()); cancel(); serving.Wait() })
	return conns, agent, clock
}

// All sandboxes of an agent share one probe for probeReuse.
func TestSnapshotIsShared(t *testing.T) {
	conns, agent, clock := connsTo(t)
	var asking sync.WaitGroup
	for range 20 {
		asking.Go(func() {
			s, err := conns.Snapshot(t.Context(), address, "a")
			if err != nil || s.GetInfo().GetPodUid() != "a" {
				t.Errorf("got %v, %v", s, err)
			}
		})
	}
	asking.Wait()
	require.Equal(t, 1, agent.Watches())
	clock.Step(probeReuse)
	_, err := conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err)
	require.Equal(t, 1, agent.Watches())
	clock.Step(time.Nanosecond)
	_, err = conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err)
	require.Equal(t, 2, agent.Watches())
	_, err = conns.FreshSnapshot(t.Context(), address, "a")
	require.NoError(t, err)
	require.Equal(t, 3, agent.Watches())
}

// Addresses are reused: an answer of another agent is no answer.
func TestSnapshotOfAnotherAgent(t *testing.T) {
	conns, _, _ := connsTo(t)
	for name, read := range map[string]func(context.Context, string, string) (*agentv1.AgentSnapshot, error){
		"Snapshot": conns.Snapshot, "FreshSnapshot": conns.FreshSnapshot,
	} {
		_, err := read(t.Context(), address, "former")
		require.True(t, errdefs.IsUnavailable(err), name)
		require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), name)
		require.ErrorContains(t, err, "agent a answers at "+address+" instead of former", name)
	}
	_, err := conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err, "the agent that has the address")
}

// A failure is shared like a snapshot, so that an agent that does not answer is not asked by each of its sandboxes.
func TestFailedProbeIsShared(t *testing.T) {
	refusing := &refusingService{}
	conns, _, clock := connsTo(t, func(a *fakeagent.Agent) {
		a.Wrap = func(s agentv1.AgentServiceServer) agentv1.AgentServiceServer {
			refusing.AgentServiceServer = s
			return refusing
		}
	})
	for range 3 {
		_, err := conns.Snapshot(t.Context(), address, "a")
		require.ErrorContains(t, err, "probing agent at "+address)
	}
	require.Equal(t, 1, refusing.calls)
	clock.Step(probeReuse + 1)
	refusing.answer = &agentv1.WatchStatusResponse{} // a heartbeat
	_, err := conns.Snapshot(t.Context(), address, "a")
	require.ErrorContains(t, err, "sent no snapshot first")
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
}

// refusingService refuses status streams, or sends its answer first.
type refusingService struct {
	agentv1.AgentServiceServer
	calls  int
	answer *agentv1.WatchStatusResponse
}

func (s *refusingService) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	s.calls++
	if s.answer != nil {
		return stream.Send(s.answer)
	}
	return errors.New("failed by the test")
}

// Drop closes the connection and forgets what the agent has answered; the next call connects again.
func TestDroppedConnection(t *testing.T) {
	conns, agent, _ := connsTo(t)
	client, err := conns.Client(address, "a")
	require.NoError(t, err)
	_, err = conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err)
	again, err := conns.Client(address, "a")
	require.NoError(t, err)
	require.Len(t, conns.conns, 1, "a connection for each client")
	_, err = again.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: "a"})
	require.NoError(t, err)

	conns.Drop(address)
	_, err = client.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: "a"})
	require.Equal(t, codes.Canceled, status.Code(err))
	s, err := conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err)
	require.False(t, s.GetAccepting(), "the snapshot from before the drain")
	require.Equal(t, 2, agent.Watches())
}

func TestClosedConnsHaveNoConnections(t *testing.T) {
	conns, _, _ := connsTo(t)
	client, err := conns.Client(address, "a")
	require.NoError(t, err)
	require.NoError(t, conns.Close())
	require.NoError(t, conns.Close())
	_, err = client.Drain(t.Context(), &agentv1.DrainRequest{AgentUid: "a"})
	require.Equal(t, codes.Canceled, status.Code(err))
	_, err = conns.FreshSnapshot(t.Context(), address, "a")
	require.Equal(t, fault.Cancelled, fault.ReasonOf(err))
}

// A caller that leaves does not fail the probe for the others.
func TestCanceledCallerFailsNoOther(t *testing.T) {
	conns, _, _ := connsTo(t)
	left, cancel := context.WithCancel(t.Context())
	cancel()
	_, _ = conns.Snapshot(left, address, "a")
	_, err := conns.Snapshot(t.Context(), address, "a")
	require.NoError(t, err)
}
