package usage_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/usage"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agents is a mesh: an allocator that knows agents, and the agents, which are one server.
type agents struct {
	usagev1.UnimplementedUsageServiceServer
	allocatorv1.AllocatorServiceClient

	list []*allocatorv1.Agent
	err  error
	conn *grpc.ClientConn
	// usage is the answer of an agent, by its uid.
	usage map[string]func(ctx context.Context, send func(...string) error) error

	mu          sync.Mutex
	asked       []*allocatorv1.ListAgentsRequest
	calls, most int // connections in use
	uses        int
}

func (a *agents) ListAgents(_ context.Context, in *allocatorv1.ListAgentsRequest, _ ...grpc.CallOption) (*allocatorv1.ListAgentsResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked = append(a.asked, in)
	return &allocatorv1.ListAgentsResponse{Agents: a.list}, rpc.ToStatus(a.err)
}

// toAgent adds the agent that is meant to a call.
type toAgent struct {
	grpc.ClientConnInterface
	uid string
}

func (c toAgent) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.ClientConnInterface.NewStream(rpc.ForTarget(ctx, rpc.Target{SandboxUID: "any", Attempt: 1, AgentUID: c.uid}), desc, method, opts...)
}

func (a *agents) connect(address, uid string) (grpc.ClientConnInterface, func(), error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if address == "" {
		return nil, nil, errors.New("no address")
	}
	a.uses++
	a.calls++
	a.most = max(a.most, a.calls)
	return toAgent{a.conn, uid}, func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.calls--
	}, nil
}

func (a *agents) ListSandboxUsage(_ *usagev1.ListSandboxUsageRequest, stream grpc.ServerStreamingServer[usagev1.ListSandboxUsageResponse]) error {
	t, err := rpc.TargetOf(stream.Context())
	if err != nil {
		return err
	}
	return a.usage[t.AgentUID](stream.Context(), func(names ...string) error {
		m := &usagev1.ListSandboxUsageResponse{AgentPod: "forged", NodeName: "forged"}
		for _, name := range names {
			m.Sandboxes = append(m.Sandboxes, &usagev1.SandboxUsage{Namespace: "forged", Pool: "forged", Name: name})
		}
		return stream.Send(m)
	})
}

func (a *agents) GetSandboxUsage(context.Context, *usagev1.GetSandboxUsageRequest) (*usagev1.GetSandboxUsageResponse, error) {
	return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
}

func (a *agents) WatchSandboxUsage(_ *usagev1.WatchSandboxUsageRequest, stream grpc.ServerStreamingServer[usagev1.WatchSandboxUsageResponse]) error {
	for _, m := range []*usagev1.WatchSandboxUsageResponse{
		{Event: &usagev1.WatchSandboxUsageResponse_Usage{Usage: &usagev1.SandboxUsage{Name: "a"}}},
		{Event: &usagev1.WatchSandboxUsageResponse_Ended_{Ended: &usagev1.WatchSandboxUsageResponse_Ended{Reason: "Completed"}}},
	} {
		if err := stream.Send(m); err != nil {
			return err
		}
	}
	return nil
}

// add adds an agent with sandboxes.
func (a *agents) add(name string, allocated int32, answer func(ctx context.Context, send func(...string) error) error) {
	a.list = append(a.list, &allocatorv1.Agent{
		Address: name + ":1", Allocated: allocated, Info: &agentv1.AgentInfo{PodName: name, PodUid: name, NodeName: "node-" + name, Namespace: "default", Pool: "p"},
	})
	a.usage[name] = answer
}

// serve serves services on an in-memory network until the end of the test.
func serve(t *testing.T, register func(*rpc.Server)) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	insecure := rpc.TLS{Insecure: true}
	server, err := rpc.NewServer(t.Context(), rpc.ServerConfig{Listener: listener, TLS: insecure, DrainTimeout: time.Second})
	require.NoError(t, err)
	register(server)
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Run(ctx) }()
	conn, err := rpc.Dial("passthrough:///server", rpc.ClientConfig{TLS: insecure, Options: []grpc.DialOption{
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }),
	}})
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, conn.Close())
		stop()
		require.NoError(t, <-served)
	})
	return conn
}

func start(t *testing.T) (*agents, usagev1.UsageServiceClient, chan struct{}) {
	t.Helper()
	a := &agents{usage: map[string]func(context.Context, func(...string) error) error{}}
	a.conn = serve(t, func(s *rpc.Server) { usagev1.RegisterUsageServiceServer(s, a) })
	draining := make(chan struct{})
	conn := serve(t, func(s *rpc.Server) {
		usagev1.RegisterUsageServiceServer(s, usage.New(usage.Config{
			Sandboxes: usagev1.NewUsageServiceClient(a.conn), Agents: a, Connect: a.connect, Draining: draining, Timeout: 300 * time.Millisecond,
		}))
	})
	return a, usagev1.NewUsageServiceClient(conn), draining
}

// listed returns the sandboxes of each agent, and the errors of others.
func listed(t *testing.T, c usagev1.UsageServiceClient, in *usagev1.ListSandboxUsageRequest) (names map[string][]string, failed map[string]string, err error) {
	t.Helper()
	stream, err := c.ListSandboxUsage(t.Context(), in)
	require.NoError(t, err)
	names, failed = map[string][]string{}, map[string]string{}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return names, failed, nil
		}
		if err != nil {
			return names, failed, rpc.FromStatus(err)
		}
		require.Equal(t, "node-"+m.GetAgentPod(), m.GetNodeName())
		for _, s := range m.GetSandboxes() {
			require.Equal(t, []string{"default", "p"}, []string{s.GetNamespace(), s.GetPool()}, "an agent reports for its own pool alone")
			names[m.GetAgentPod()] = append(names[m.GetAgentPod()], s.GetName())
		}
		if m.GetError() != "" {
			failed[m.GetAgentPod()] = m.GetError()
		}
	}
}

// TestListIsPartial: what agents do not answer is reported, and the rest is there.
func TestListIsPartial(t *testing.T) {
	a, c, _ := start(t)
	type send = func(...string) error
	a.add("one", 1, func(_ context.Context, s send) error { return s("a") })
	a.add("two", 3, func(_ context.Context, s send) error { return errors.Join(s("b", "c"), s("d")) })
	a.add("idle", 0, func(context.Context, send) error { return errors.New("it must not be asked") })
	a.add("hangs", 1, func(ctx context.Context, s send) error { <-ctx.Done(); return ctx.Err() })
	a.add("half", 2, func(_ context.Context, s send) error {
		return errors.Join(s("e"), fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping"))
	})
	a.add("nowhere", 1, nil)
	a.list[len(a.list)-1].Address = ""
	names, failed, err := listed(t, c, &usagev1.ListSandboxUsageRequest{Namespace: "default", Pool: "p"})
	require.NoError(t, err)
	require.Equal(t, map[string][]string{"one": {"a"}, "two": {"b", "c", "d"}, "half": {"e"}}, names)
	require.Equal(t, map[string]string{
		"hangs": "the agent did not answer within 300ms", "half": "the agent is stopping", "nowhere": "the agent cannot be reached",
	}, failed)
	require.Equal(t, []string{"default", "p"}, []string{a.asked[0].GetNamespace(), a.asked[0].GetPool()})
	require.Zero(t, a.calls, "no connection is in use")

	a.err = fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "starting")
	_, _, err = listed(t, c, &usagev1.ListSandboxUsageRequest{})
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err))
}

// TestListIsBounded: of many agents only some are asked at once, and a caller who leaves ends all calls.
func TestListIsBounded(t *testing.T) {
	a, c, _ := start(t)
	release := make(chan struct{})
	for i := range 100 {
		a.add("agent-"+strconv.Itoa(i), 1, func(ctx context.Context, s func(...string) error) error {
			select {
			case <-release:
				return s("a")
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}
	inUse := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.calls
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := c.ListSandboxUsage(ctx, &usagev1.ListSandboxUsageRequest{})
	require.NoError(t, err)
	require.Eventually(t, func() bool { return inUse() == 32 }, testkit.Timeout, time.Millisecond)
	cancel()
	_, err = stream.Recv()
	require.Error(t, err)
	require.Eventually(t, func() bool { return inUse() == 0 }, testkit.Timeout, time.Millisecond)
	a.mu.Lock()
	require.Less(t, a.uses, 100, "the others are not asked")
	a.mu.Unlock()

	close(release)
	names, failed, err := listed(t, c, &usagev1.ListSandboxUsageRequest{})
	require.NoError(t, err)
	require.Len(t, names, 100)
	require.Empty(t, failed)
	require.Equal(t, 32, a.most)
}

// TestDraining: a list that runs when the gateway stops ends with an error that asks the caller to connect again.
func TestDraining(t *testing.T) {
	a, c, draining := start(t)
	entered := make(chan struct{})
	a.add("one", 1, func(ctx context.Context, _ func(...string) error) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	})
	go func() { <-entered; close(draining) }()
	_, _, err := listed(t, c, &usagev1.ListSandboxUsageRequest{})
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err))
	require.ErrorContains(t, err, "connect again")
}

func TestCallsAboutOneSandbox(t *testing.T) {
	_, c, _ := start(t)
	_, err := c.GetSandboxUsage(t.Context(), &usagev1.GetSandboxUsageRequest{Namespace: "default", Name: "a"})
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(rpc.FromStatus(err)))
	stream, err := c.WatchSandboxUsage(t.Context(), &usagev1.WatchSandboxUsageRequest{Namespace: "default", Name: "a"})
	require.NoError(t, err)
	m, err := stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "a", m.GetUsage().GetName())
	m, err = stream.Recv()
	require.NoError(t, err)
	require.Equal(t, "Completed", m.GetEnded().GetReason())
	_, err = stream.Recv()
	require.ErrorIs(t, err, io.EOF)
}
