// Package rest is the REST face of the SandboxService: grpc-gateway's routes and JSON, with what a public HTTP API needs
// around them: errors as google.rpc.Status under the right HTTP code, bounded bodies, refused unknown fields, idempotency
// keys, streams as newline-delimited JSON or raw bytes, one trace through, metrics and an access log. It keeps no state
// of sandboxes. The handler is safe for concurrent use.
package rest

import (
	"context"
	"net/http"
	"time"

	"github.com/go-logr/logr"
	"github.com/grpc-ecosystem/grpc-gateway/v2/runtime"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"google.golang.org/protobuf/encoding/protojson"
	"k8s.io/utils/clock"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Config says what the handler serves.
type Config struct {
	// Client of the allocator.
	Client sandboxv1.SandboxServiceClient
	// Ready tells whether the allocator can be reached.
	Ready func(context.Context) error
	// Document is the OpenAPI document.
	Document []byte
	// MaxBodyBytes is the largest body that is taken.
	MaxBodyBytes int64
	// RequestTimeout bounds every request but streams.
	RequestTimeout time.Duration
	// Roles that may call the API; nil for everyone.
	Roles []rpc.Role
	// Draining is closed when the process ends: streams end with an error that asks the caller to come again.
	Draining <-chan struct{}
	// Registry takes the metrics; Log the access log; Clock the time of both.
	Registry prometheus.Registerer
	Log      logr.Logger
	Clock    clock.PassiveClock
}

// api is the handler's shared state; all of it is read-only once New has returned.
type api struct {
	config  Config
	client  sandboxv1.SandboxServiceClient
	metrics *metrics
	json    runtime.Marshaler
	mux     *runtime.ServeMux
}

// New returns the handler.
//
// A request passes, from outside in: trace -> exchange (request id, metrics, access log, panics) -> cross-origin check ->
// role check -> body -> route -> query check -> timeout -> gRPC call.
func New(cfg Config) (http.Handler, error) {
	m, err := newMetrics(cfg.Registry)
	if err != nil {
		return nil, err
	}
	a := &api{config: cfg, client: client{cfg.Client}, metrics: m, json: marshaler{&runtime.JSONPb{
		MarshalOptions:   protojson.MarshalOptions{},
		UnmarshalOptions: protojson.UnmarshalOptions{DiscardUnknown: false},
	}}}
	if err := a.route(); err != nil {
		return nil, err
	}
	root := http.NewServeMux()
	root.Handle("/healthz", a.page("/healthz", a.healthz))
	root.Handle("/readyz", a.page("/readyz", a.readyz))
	root.Handle("/openapi.json", a.page("/openapi.json", a.openapi))
	origin := http.NewCrossOriginProtection()
	origin.SetDenyHandler(http.HandlerFunc(a.crossOrigin))
	root.Handle("/", origin.Handler(a.authorized(a.withBody(a.mux))))
	return otelhttp.NewHandler(a.exchanged(root), "gateway", otelhttp.WithFilter(traced),
		otelhttp.WithSpanNameFormatter(func(_ string, r *http.Request) string { return r.Method })), nil
}

func traced(r *http.Request) bool { return r.URL.Path != "/healthz" && r.URL.Path != "/readyz" }

func (a *api) route() error {
	nothing := func(string) (string, bool) { return "", false }
	a.mux = runtime.NewServeMux(
		runtime.WithMarshalerOption(runtime.MIMEWildcard, a.json),
		runtime.WithErrorHandler(a.handleError),
		runtime.WithRoutingErrorHandler(a.handleRoutingError),
		runtime.WithIncomingHeaderMatcher(nothing), // a caller must not speak gRPC metadata in the gateway's name
		runtime.WithOutgoingHeaderMatcher(nothing),
		runtime.WithOutgoingTrailerMatcher(nothing),
		runtime.WithDisableHTTPMethodOverride(),
		runtime.WithDisablePathLengthFallback(),
		runtime.WithWriteContentLength(),
		runtime.WithMiddlewares(a.routed, a.checkQuery, a.bounded),
	)
	if err := sandboxv1.RegisterSandboxServiceHandlerClient(context.Background(), a.mux, a.client); err != nil {
		return err
	}
	return a.routeStreams()
}

// bounded gives a request its deadline; the streams, which have none, take it off themselves.
func (a *api) bounded(next runtime.HandlerFunc) runtime.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request, params map[string]string) {
		if isStream(r) {
			next(w, r, params)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), a.config.RequestTimeout)
		defer cancel()
		next(w, r.WithContext(ctx), params)
	}
}
