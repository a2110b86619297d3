// Package app wires the gateway: connections to the allocator and the garbage collector, the REST handler, an HTTPS server,
// probes and metrics. It keeps no state of sandboxes: any number of gateways may run, and each may be killed at any time.
// Run is called once.
package app

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"sync"

	"github.com/go-logr/logr"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/gateway/internal/rest"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/gen/openapi"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
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

// Serve is Run on an open listener, which it closes. options are added to both connections.
func Serve(ctx context.Context, cfg Config, listener net.Listener, options ...grpc.DialOption) error {
	listener = rpc.Limit(listener, maxConnections, maxPerHost)
	defer listener.Close()
	allocator, err := rpc.Dial(cfg.AllocatorAddress, rpc.ClientConfig{
		TLS: cfg.TLS, ServerName: rpc.RoleAllocator.ServerName(), Silence: rpc.DefaultSilence, Options: options,
	})
	if err != nil {
		return err
	}
	defer allocator.Close()
	collector, err := rpc.Dial(cfg.CollectorAddress, rpc.ClientConfig{
		TLS: cfg.TLS, ServerName: rpc.RoleGC.ServerName(), Silence: rpc.DefaultSilence, Options: options,
	})
	if err != nil {
		return err
	}
	defer collector.Close()

	tokens, access, err := cfg.access()
	if err != nil {
		return err
	}
	log := logr.FromContextOrDiscard(ctx)
	registry := obs.NewRegistry()
	draining := make(chan struct{})
	grpcSide, err := cfg.edge(ctx, allocator, collector, tokens, access, registry, draining)
	if err != nil {
		return err
	}
	defer grpcSide.close()
	upstream, sessions := rest.NewUpstream(allocator), &sync.WaitGroup{}
	handler, err := cfg.handler(rest.Config{
		Allocator: allocator, Collector: collector, Sandboxes: grpcSide.own, Files: grpcSide.ownFiles, RPC: grpcSide.server, Ready: upstream.Check,
		Draining: draining, Sessions: sessions, Registry: registry, Log: log, Clock: clock.RealClock{},
	}, tokens)
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
	group.Go("gRPC", grpcSide.server.Run)
	group.Go("https", func(ctx context.Context) error {
		log.Info("serving", obs.KeyAddress, listener.Addr().String(), obs.KeyAllocator, cfg.AllocatorAddress, obs.KeyCollector, cfg.CollectorAddress)
		return serve(ctx, server, listener, cfg, draining, sessions)
	})
	group.Go("allocator health", func(ctx context.Context) error {
		upstream.Follow(ctx, clock.RealClock{}, func(err error) {
			report(log, probes, err)
			grpcSide.server.SetReady(err == nil)
		})
		probes.Shutdown()
		return nil
	})
	return group.Run(ctx)
}

// handler returns the REST side.
func (c *Config) handler(settings rest.Config, tokens *auth.Bearer) (http.Handler, error) {
	if tokens != nil {
		settings.Tokens = tokens
	}
	document, err := openapi.YAML()
	if err != nil {
		return nil, err
	}
	settings.JSON, settings.YAML = openapi.JSON(), document
	settings.MaxBodyBytes, settings.RequestTimeout, settings.Origins = c.MaxBodyBytes, c.RequestTimeout, c.AllowedOrigins
	return rest.New(settings)
}

// access returns the authenticator and the authorizer of users; nil if the gateway does not authenticate callers.
func (c *Config) access() (*auth.Bearer, *auth.Authorizer, error) {
	if c.TLS.Insecure {
		return nil, nil, nil
	}
	api, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return nil, nil, fmt.Errorf("reading --kubeconfig: %w", err)
	}
	api.UserAgent = "fast-sandbox-gateway/" + daemon.Version()
	api.QPS = -1 // answers are remembered
	httpClient, err := restclient.HTTPClientFor(api)
	if err != nil {
		return nil, nil, fmt.Errorf("creating the API server client: %w", err)
	}
	return c.Access.New(api, httpClient, clock.RealClock{})
}

// report updates the probes. The empty service reports that the process is alive. The SandboxService is ready while the
// allocator can be reached: a restart of the gateway does not help if it cannot.
func report(log logr.Logger, probes *health.Server, err error) {
	state := healthv1.HealthCheckResponse_SERVING
	if err != nil {
		state = healthv1.HealthCheckResponse_NOT_SERVING
		log.Info("allocator unreachable", obs.KeyError, err.Error())
	} else {
		log.Info("allocator reachable")
	}
	probes.SetServingStatus(sandboxv1.SandboxService_ServiceDesc.ServiceName, state)
}
