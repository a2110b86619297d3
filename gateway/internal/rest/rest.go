// Package rest is the REST API: grpc-gateway's routes and JSON for the methods that have an HTTP binding, and what a public
// HTTP API needs besides: errors as google.rpc.Status with the right HTTP code, bounded bodies, refusal of unknown fields,
// idempotency keys, streams as newline-delimited JSON or raw bytes, trace propagation, metrics and an access log. It keeps
// no state of sandboxes. The handler is safe for concurrent use.
package rest

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"k8s.io/utils/clock"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	filesystemv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/filesystem/v1"
	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	processv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/process/v1"
	runv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/run/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	usagev1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/usage/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/audit"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Names of the upstreams in messages.
const (
	allocatorName = "allocator"
	collectorName = "garbage collector"
	sandboxesName = "agent of the sandbox"
)

// Config is what the handler needs.
type Config struct {
	// Allocator and Collector are connections to the allocator and to the garbage collector, Sandboxes is one to what passes calls on to agents,
	// and Files one for what is in files.
	Allocator, Collector, Sandboxes, Files grpc.ClientConnInterface
	// RPC serves the gRPC services over net/http, with its own checks of who calls; nil for no Connect and no gRPC-Web. *rpc.Server implements it.
	RPC interface {
		http.Handler
		Services() []string
	}
	// Ready returns nil if the allocator can be reached.
	Ready func(context.Context) error
	// JSON and YAML are the OpenAPI document.
	JSON, YAML []byte
	// MaxBodyBytes is the maximum size of a body.
	MaxBodyBytes int64
	// RequestTimeout bounds every request except streams.
	RequestTimeout time.Duration
	// Tokens authenticates callers without a certificate; nil means that callers are not authenticated.
	Tokens Tokens
	// Draining is closed when the process stops: streams end with an error that asks the caller to connect again.
	Draining <-chan struct{}
	// Origins are the origins of other sites whose pages may call (https://console.example.com).
	Origins []string
	// Sessions counts WebSockets, if it is set: http.Server.Shutdown does not wait for them.
	Sessions *sync.WaitGroup
	// Registry takes the metrics, Log the access log. Clock is the time of both.
	Registry prometheus.Registerer
	Log      logr.Logger
	Clock    clock.Clock
}

// api is the shared state of the handler. It is read-only after New has returned.
type api struct {
	config  Config
	routes  routeTable
	metrics *metrics
	audit   *audit.Log
	json    runtime.Marshaler
	mux     *runtime.ServeMux
}

// New returns the handler.
//
// A request passes, from outside in: trace -> exchange (request id, metrics, access log, panics) -> CORS -> cross-origin check ->
// authentication -> body -> route -> query check -> timeout -> gRPC call. One to a port of a sandbox goes to its server after the authentication.
func New(cfg Config) (http.Handler, error) {
	m, err := newMetrics(cfg.Registry)
	if err != nil {
		return nil, err
	}
	refusals, err := audit.New(cfg.Log, cfg.Registry, cfg.Clock)
	if err != nil {
		return nil, err
	}
	a := &api{config: cfg, metrics: m, audit: refusals, json: marshaler{&runtime.JSONPb{
		MarshalOptions:   protojson.MarshalOptions{},
		UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: false},
	}}}
	if err := a.route(); err != nil {
		return nil, err
	}
	root := http.NewServeMux()
	for path, serve := range map[string]http.HandlerFunc{
		"/healthz": a.healthz, "/readyz": a.readyz,
		"/openapi.json": a.document("application/json", cfg.JSON), "/openapi.yaml": a.document("application/yaml", cfg.YAML),
	} {
		root.Handle(path, a.page(path, serve))
	}
	origin := http.NewCrossOriginProtection()
	for _, o := range cfg.Origins {
		if err := origin.AddTrustedOrigin(o); err != nil {
			return nil, fmt.Errorf("allowing an origin: %w", err)
		}
	}
	origin.SetDenyHandler(http.HandlerFunc(a.crossOrigin))
	root.Handle("/", origin.Handler(a.authenticated(a.withBody(a.mux))))
	root.Handle(terminalPath, newTerminals(a))
	root.Handle(filesPath, origin.Handler(a.authenticated(newContents(a))))
	if err := a.web(root, origin); err != nil {
		return nil, err
	}
	return otelhttp.NewHandler(a.exchanged(a.cors(newPorts(a, origin, root))), "gateway", otelhttp.WithFilter(traced),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return r.Method })), nil
}

func traced(r *http.Request) bool { return r.URL.Path != "/healthz" && r.URL.Path != "/readyz" }

// route registers the services.
func (a *api) route() error {
	none := func(string) (string, bool) { return "", false }
	a.mux = runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, a.json),
		runtime.WithErrorHandler(a.handleError),
		runtime.WithRoutingErrorHandler(a.handleRoutingError),
		runtime.WithIncomingHeaderMatcher(none), // a caller must not set gRPC metadata in the gateway's name
		runtime.WithOutgoingHeaderMatcher(none),
		runtime.WithOutgoingTrailerMatcher(none),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithWriteContentLength(),
		runtime.WithMiddlewares(a.routed, a.checkQuery, a.bounded),
	)
	allocator := retrying{rpc.OnBehalf(a.config.Allocator), a.config.Clock}
	collector := retrying{rpc.OnBehalf(a.config.Collector), a.config.Clock}
	// A call into a sandbox is not repeated: it may have had an effect there.
	sandboxes := rpc.OnBehalf(a.config.Sandboxes)
	a.routes = newRouteTable(services(upstream{allocatorName, allocator}, upstream{collectorName, collector}, upstream{sandboxesName, sandboxes}))
	ctx := context.Background()
	if err := sandboxv1.RegisterSandboxServiceHandlerClient(ctx, a.mux, client{sandboxv1.NewSandboxServiceClient(allocator)}); err != nil {
		return err
	}
	if err := allocatorv1.RegisterAllocatorServiceHandlerClient(ctx, a.mux, allocatorv1.NewAllocatorServiceClient(allocator)); err != nil {
		return err
	}
	if err := gcv1.RegisterGarbageCollectorServiceHandlerClient(ctx, a.mux, gcv1.NewGarbageCollectorServiceClient(collector)); err != nil {
		return err
	}
	if err := processv1.RegisterProcessServiceHandlerClient(ctx, a.mux, processv1.NewProcessServiceClient(sandboxes)); err != nil {
		return err
	}
	if err := runv1.RegisterRunServiceHandlerClient(ctx, a.mux, runv1.NewRunServiceClient(sandboxes)); err != nil {
		return err
	}
	if err := usagev1.RegisterUsageServiceHandlerClient(ctx, a.mux, usagev1.NewUsageServiceClient(sandboxes)); err != nil {
		return err
	}
	if err := filesystemv1.RegisterFilesystemServiceHandlerClient(ctx, a.mux, filesystemv1.NewFilesystemServiceClient(sandboxes)); err != nil {
		return err
	}
	if err := authv1.RegisterAuthServiceHandlerClient(ctx, a.mux, authv1.NewAuthServiceClient(allocator)); err != nil {
		return err
	}
	return a.routeStreams()
}

// bounded adds a deadline to a request that is not a stream.
func (a *api) bounded(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if exchangeOf(r.Context()).binding.streams() {
			next(w, r, params)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), a.config.RequestTimeout)
		defer cancel()
		next(w, r.WithContext(ctx), params)
	}
}
