package app_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/app"
	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// places is an allocator that knows one agent with the sandbox web.
type places struct {
	allocatorv1.UnimplementedAllocatorServiceServer
	address string
}

func (p *places) LocateSandbox(_ context.Context, in *allocatorv1.LocateSandboxRequest) (*allocatorv1.LocateSandboxResponse, error) {
	if in.GetName() != "web" {
		return nil, fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "no such sandbox")
	}
	return &allocatorv1.LocateSandboxResponse{Assignment: &allocatorv1.Assignment{
		Fence: &agentv1.Fence{SandboxUid: "uid", Attempt: 2, AgentUid: "agent-uid"}, AgentAddress: p.address,
	}}, nil
}

func (p *places) ListAgents(context.Context, *allocatorv1.ListAgentsRequest) (*allocatorv1.ListAgentsResponse, error) {
	info := &agentv1.AgentInfo{PodName: "agent-1", PodUid: "agent-uid", NodeName: "node-1", Namespace: "default", Pool: "p"}
	return &allocatorv1.ListAgentsResponse{Agents: []*allocatorv1.Agent{{Info: info, Address: p.address, Allocated: 1}}}, nil
}

// metered is an agent that has the sandbox.
type metered struct {
	usagev1.UnimplementedUsageServiceServer
}

func (metered) GetSandboxUsage(ctx context.Context, _ *usagev1.GetSandboxUsageRequest) (*usagev1.GetSandboxUsageResponse, error) {
	t, err := rpc.TargetOf(ctx)
	if err != nil {
		return nil, err
	}
	return &usagev1.GetSandboxUsageResponse{Usage: &usagev1.SandboxUsage{Name: "web", Uid: t.SandboxUID}}, nil
}

func (metered) WatchSandboxUsage(in *usagev1.WatchSandboxUsageRequest, s usagev1.UsageService_WatchSandboxUsageServer) error {
	t, err := rpc.TargetOf(s.Context())
	if err != nil {
		return err
	}
	usage := &usagev1.SandboxUsage{Name: in.GetInterval().AsDuration().String(), Uid: t.SandboxUID}
	if err := s.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Usage{Usage: usage}}); err != nil {
		return err
	}
	return s.Send(&usagev1.WatchSandboxUsageResponse{Event: &usagev1.WatchSandboxUsageResponse_Ended_{Ended: &usagev1.WatchSandboxUsageResponse_Ended{Reason: "Completed"}}})
}

func (metered) ListSandboxUsage(_ *usagev1.ListSandboxUsageRequest, s usagev1.UsageService_ListSandboxUsageServer) error {
	return s.Send(&usagev1.ListSandboxUsageResponse{Sandboxes: []*usagev1.SandboxUsage{{Name: "web"}}})
}

// TestUsageByREST: usage comes from the agent of the sandbox, and lists from all agents.
func TestUsageByREST(t *testing.T) {
	ctx := logr.NewContext(context.WithoutCancel(t.Context()), logr.Discard())
	insecure := rpc.TLS{Insecure: true}
	serve := func(register func(*rpc.Server)) (address string, stop func() error) {
		s, err := rpc.NewServer(ctx, rpc.ServerConfig{Listener: listen(t), TLS: insecure, DrainTimeout: 10 * time.Millisecond})
		require.NoError(t, err)
		register(s)
		s.SetReady(true)
		return s.Addr().String(), background(ctx, s.Run)
	}
	agent, stopAgent := serve(func(s *rpc.Server) { usagev1.RegisterUsageServiceServer(s, metered{}) })
	allocator, stopAllocator := serve(func(s *rpc.Server) { allocatorv1.RegisterAllocatorServiceServer(s, &places{address: agent}) })
	listener := listen(t)
	cfg := app.Config{AllocatorAddress: allocator, CollectorAddress: allocator, MaxBodyBytes: 1 << 20, RequestTimeout: 20 * time.Second, DrainTimeout: time.Second}
	cfg.GRPCAddress, cfg.TLS, cfg.MetricsAddress, cfg.HealthSocket = "127.0.0.1:0", insecure, "0", "0"
	stopGateway := background(ctx, func(ctx context.Context) error { return app.Serve(ctx, cfg, listener) })
	g := &gateway{url: "http://" + listener.Addr().String(), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(func() {
		g.client.CloseIdleConnections()
		require.NoError(t, stopGateway())
		require.NoError(t, stopAllocator())
		require.NoError(t, stopAgent())
	})
	get := func(path string) answer { return g.do(t, http.MethodGet, path, "") }
	one := "/v1/namespaces/default/sandboxes/web/usage"
	a := get(one)
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.JSONEq(t, `{"usage":{"name":"web","uid":"uid"}}`, a.body)
	lines := strings.Split(strings.TrimSpace(get(one+":watch?interval=1.5s").body), "\n")
	require.Len(t, lines, 2)
	require.JSONEq(t, `{"result":{"usage":{"name":"1.5s","uid":"uid"}}}`, lines[0])
	require.JSONEq(t, `{"result":{"ended":{"reason":"Completed"}}}`, lines[1])
	for _, path := range []string{"/v1/namespaces/default/sandboxes:usage", "/v1/sandboxes:usage?pool=p"} {
		require.JSONEq(t, `{"result":{"agentPod":"agent-1","nodeName":"node-1","sandboxes":[{"name":"web","namespace":"default","pool":"p"}]}}`, get(path).body)
	}

	a = get("/v1/namespaces/default/sandboxes/none/usage")
	require.Equal(t, http.StatusNotFound, a.code)
	require.Equal(t, string(fault.SandboxNotFound), a.failure(t).Details[0].Reason)
	a = get(one + ":watch?interval=1ms")
	require.Equal(t, http.StatusBadRequest, a.code)
	require.Contains(t, a.body, "interval")
	require.Equal(t, http.StatusBadRequest, get("/v1/namespaces/default/sandboxes:usage?frob=1").code)
}
