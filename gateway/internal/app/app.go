// Package app wires the gateway: one connection to the allocator, the REST handler, an HTTPS server, probes and metrics.
// It holds no state of sandboxes: any number of gateways may run, and each may be killed at any time.
package app

import (
	"context"
	"fmt"
	"net"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/gen/openapi"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Run runs the gateway until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	listener, err := net.Listen("tcp", cfg.Address)
	if err != nil {
		return fmt.Errorf("listening: %w", err)
	}
	return Serve(ctx, cfg, listener)
}

// Serve is Run on a listener that is open already; it closes it.
func Serve(ctx context.Context, cfg Config, listener net.Listener, options ...grpc.DialOption) error {
	defer listener.Close()
	conn, err := rpc.Dial(cfg.AllocatorAddress, rpc.ClientConfig{
		TLS: cfg.TLS, ServerName: rpc.RoleAllocator.ServerName(), Options: options,
	})
	if err != nil {
		return err
	}
	defer conn.Close()

	log := logr.FromContextOrDiscard(ctx)
	registry := obs.NewRegistry()
	draining := make(chan struct{})
	upstream := rest.NewUpstream(conn)
	handler, err := rest.New(rest.Config{
		Client: sandboxv1.NewSandboxServiceClient(conn), Ready: upstream.Check,
		Document: openapi.Document(), MaxBodyBytes: cfg.MaxBodyBytes, RequestTimeout: cfg.RequestTimeout,
		Roles: callers(cfg.TLS), Draining: draining, Registry: registry, Log: log, Clock: clock.RealClock{},
	})
	if err != nil {
		return err
	}
	server, err := newServer(cfg, handler, log)
	if err != nil {
		return err
	}
	probes := health.NewServer()
	group := daemon.NewGroup()
	cfg.Serve(group, registry, probes)
	group.Go("https", func(ctx context.Context) error {
		log.Info("serving", "address", listener.Addr().String(), "allocator", cfg.AllocatorAddress)
		return serve(ctx, server, listener, cfg, draining)
	})
	group.Go("allocator health", func(ctx context.Context) error {
		upstream.Follow(ctx, clock.RealClock{}, func(err error) { report(log, probes, err) })
		probes.Shutdown()
		return nil
	})
	return group.Run(ctx)
}

// callers are the roles that may use the API; nil for everyone. Other components' certificates are not enough: behind the
// gateway they would act with its rights.
func callers(t rpc.TLS) []rpc.Role {
	if t.Insecure {
		return nil
	}
	return []rpc.Role{rpc.RoleClient}
}

// report tells the probes. The empty service is the process's own life; the SandboxService is ready while the allocator
// can be reached, so a restart, which would not help, is not asked for.
func report(log logr.Logger, probes *health.Server, err error) {
	state := healthv1.HealthCheckResponse_SERVING
	if err != nil {
		state = healthv1.HealthCheckResponse_NOT_SERVING
		log.Info("allocator cannot be reached", "err", err.Error())
	} else {
		log.Info("allocator reached")
	}
	probes.SetServingStatus(sandboxv1.SandboxService_ServiceDesc.ServiceName, state)
}
