package app

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/edge"
	"github.com/fast-sandbox/fast-sandbox/gateway/internal/run"
	"github.com/fast-sandbox/fast-sandbox/gateway/internal/usage"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// maxMessage is the largest message of a client: a file in one piece.
const maxMessage = 8 << 20

// edgeServer is the gateway's gRPC side.
type edgeServer struct {
	server *rpc.Server
	router *edge.Router
	// own and ownFiles are connections to it: REST calls into sandboxes come the same way as others, so that one place decides about them.
	own, ownFiles *grpc.ClientConn
}

// edge returns the gRPC server. It listens already.
func (c *Config) edge(ctx context.Context, allocator, collector grpc.ClientConnInterface, tokens *auth.Bearer, access *auth.Authorizer, registry prometheus.Registerer, draining <-chan struct{}) (*edgeServer, error) {
	limits, err := limit.New(c.Limits, clock.RealClock{}, registry)
	if err != nil {
		return nil, err
	}
	var users *rpc.Users
	if tokens != nil {
		users = &rpc.Users{Tokens: tokens, Access: access, Rules: edge.Rules(), Proxies: []rpc.Role{rpc.RoleGateway}, Limits: limits}
	}
	e := &edgeServer{}
	e.server, err = rpc.NewServer(ctx, rpc.ServerConfig{
		Address: c.GRPCAddress, TLS: c.TLS, Users: users, Registry: registry, MaxRecvBytes: maxMessage, DrainTimeout: c.DrainTimeout, Files: true, Web: true,
	})
	if err != nil {
		return nil, err
	}
	e.router = edge.NewRouter(edge.Config{
		Locator: allocatorv1.NewAllocatorServiceClient(allocator),
		Dial: func(address, agentUID string, files bool) (*grpc.ClientConn, error) {
			return rpc.Dial(address, rpc.ClientConfig{TLS: c.TLS, AgentUID: agentUID, Bulk: true, Files: files})
		},
		Clock: clock.RealClock{},
	})
	for _, s := range []struct {
		services []protoreflect.ServiceDescriptor
		to       grpc.ClientConnInterface
	}{{edge.OfAllocator, rpc.OnBehalf(allocator)}, {edge.OfCollector, rpc.OnBehalf(collector)}, {edge.OfAgents, e.router}} {
		for _, d := range s.services {
			edge.Register(e.server, d, s.to, draining)
		}
	}
	runv1.RegisterRunServiceServer(e.server, run.New(run.Config{
		Sandboxes: sandboxv1.NewSandboxServiceClient(rpc.OnBehalf(allocator)), Processes: processv1.NewProcessServiceClient(e.router), Clock: clock.RealClock{},
		Draining: draining,
	}))
	usagev1.RegisterUsageServiceServer(e.server, usage.New(usage.Config{
		Sandboxes: usagev1.NewUsageServiceClient(e.router), Agents: allocatorv1.NewAllocatorServiceClient(allocator), Connect: e.router.Agent, Draining: draining,
	}))
	_, port, err := net.SplitHostPort(e.server.Addr().String())
	if err != nil {
		return nil, fmt.Errorf("reading the address of the gRPC server: %w", err)
	}
	to := rpc.ClientConfig{TLS: c.TLS, ServerName: rpc.RoleGateway.ServerName(), Bulk: true}
	if e.own, err = rpc.Dial(net.JoinHostPort("localhost", port), to); err != nil {
		return nil, err
	}
	to.Files = true
	e.ownFiles, err = rpc.Dial(net.JoinHostPort("localhost", port), to)
	return e, err
}

func (e *edgeServer) close() {
	_ = errors.Join(e.own.Close(), e.ownFiles.Close())
	e.router.Close()
}
