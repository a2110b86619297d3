package rpc

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	"buf.build/go/protovalidate"
	"github.com/go-logr/logr"
	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/selector"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

const (
	defaultMaxRecvBytes = 1 << 20
	// hardMaxRecvBytes is the limit of gRPC itself, which rejects larger messages without a typed error. Validation has a much
	// lower limit.
	hardMaxRecvBytes    = 16 << 20
	defaultDrainTimeout = 10 * time.Second
)

// ServerConfig configures a server.
type ServerConfig struct {
	// Address to listen on (host:port). Listener, if set, is used instead.
	Address  string
	Listener net.Listener
	// TLS of the server.
	TLS TLS
	// Allow maps a full method (/package.Service/Method) or a service (package.Service) to the roles that may call it. A
	// method's entry takes precedence. Without an entry, no component may call, except the health and reflection services.
	Allow map[string][]Role
	// Users lets users call, too. Nil: only components may.
	Users *Users
	// Guard checks each call that was admitted, except calls of the health and reflection services. Nil: no check.
	Guard func(ctx context.Context, method string) error
	// Unary and Stream run after all checks and before the handler.
	Unary  []grpc.UnaryServerInterceptor
	Stream []grpc.StreamServerInterceptor
	// Registry registers the server's metrics. Nil: none.
	Registry prometheus.Registerer
	// DrainTimeout bounds how long running calls continue after shutdown begins. Zero: 10 s.
	DrainTimeout time.Duration
	// MaxRecvBytes is the size of the largest accepted message. Zero: 1 MiB. At most 16 MiB.
	MaxRecvBytes int
	// Limits bound what peers can hold. Zero: DefaultLimits.
	Limits Limits
	// Files says that files arrive, too: more of a stream is on its way before it is read.
	Files bool
	// Web lets ServeHTTP serve the same services.
	Web bool
}

// Server is a gRPC server with the interceptors and services that every server of the project has.
type Server struct {
	config   ServerConfig
	listener *limitedListener
	grpc     *grpc.Server
	web      *grpc.Server // for net/http, nil without; it is another one because the end of grpc would break its calls
	health   *health.Server
	metrics  *grpcprom.ServerMetrics
}

// NewServer returns a server that listens already, so that an occupied port is an error at startup. Run serves. ctx carries
// the logger.
func NewServer(ctx context.Context, cfg ServerConfig) (*Server, error) {
	if cfg.MaxRecvBytes == 0 {
		cfg.MaxRecvBytes = defaultMaxRecvBytes
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = defaultDrainTimeout
	}
	if cfg.Limits == (Limits{}) {
		cfg.Limits = DefaultLimits()
	}
	log := logr.FromContextOrDiscard(ctx)
	creds, err := serverCredentials(log, cfg.TLS, cfg.Users != nil)
	if err != nil {
		return nil, err
	}
	validator, err := protovalidate.New()
	if err != nil {
		return nil, fmt.Errorf("creating the validator: %w", err)
	}
	s := &Server{config: cfg, health: health.NewServer(), metrics: grpcprom.NewServerMetrics(
		grpcprom.WithServerHandlingTimeHistogram(grpcprom.WithHistogramBuckets(obs.LatencyBuckets)))}
	if cfg.Registry != nil {
		if err := cfg.Registry.Register(s.metrics); err != nil {
			return nil, fmt.Errorf("registering server metrics: %w", err)
		}
	}
	listener := cfg.Listener
	if listener == nil {
		if listener, err = net.Listen("tcp", cfg.Address); err != nil {
			return nil, fmt.Errorf("listening: %w", err)
		}
	}
	users, err := cfg.Users.audited(log, cfg.Registry)
	if err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	s.listener = newLimited(listener, cfg.Limits.Connections, cfg.Limits.PerHost)
	a := s.admission(validator, users)
	unary, stream := s.interceptors(log, a)
	options := append(cfg.Limits.options(),
		grpc.ChainUnaryInterceptor(unary...), grpc.ChainStreamInterceptor(stream...),
		grpc.Creds(creds), grpc.StatsHandler(otelgrpc.NewServerHandler()), grpc.MaxRecvMsgSize(hardMaxRecvBytes),
		grpc.ForceServerCodecV2(newCodec()), grpc.InTapHandle(a.tap))
	if cfg.Files {
		options = append(options, grpc.InitialWindowSize(filesWindow), grpc.InitialConnWindowSize(filesConnWindow))
	}
	s.grpc = grpc.NewServer(options...)
	if cfg.Web {
		s.web = grpc.NewServer(options...)
	}
	for _, server := range s.servers() {
		healthv1.RegisterHealthServer(server, s.health)
		reflection.Register(server)
	}
	// Probes must not see SERVING before Run.
	s.health.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	return s, nil
}

func (s *Server) admission(validator protovalidate.Validator, users *Users) *admission {
	return &admission{allow: s.config.Allow, users: users, guard: s.config.Guard, insecure: s.config.TLS.Insecure, validate: validate(validator, s.config.MaxRecvBytes), stranger: s.stranger}
}

// stranger counts a call without valid credentials.
func (s *Server) stranger(ctx context.Context) {
	if peerCertificate(ctx) != nil {
		return
	}
	if conn, ok := ctx.Value(connKey{}).(net.Conn); ok {
		if Strange(conn) {
			_ = conn.Close()
		}
		return
	}
	if s.listener != nil {
		s.listener.stranger(peerAddress(ctx))
	}
}

// interceptors returns those of unary calls and those of streams, the outermost first.
func (s *Server) interceptors(log logr.Logger, a *admission) ([]grpc.UnaryServerInterceptor, []grpc.StreamServerInterceptor) {
	access, options := accessLogger(log), accessLogOptions()
	recoverer := recovery.WithRecoveryHandlerContext(recovered)
	checks := check{a.call, a.enter, a.message, a.validate}
	withLog := func(ctx context.Context) context.Context { return logr.NewContext(ctx, log) }
	unary := []grpc.UnaryServerInterceptor{
		accept,
		func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, h grpc.UnaryHandler) (any, error) {
			return h(withLog(ctx), req)
		},
		s.metrics.UnaryServerInterceptor(),
		selector.UnaryServerInterceptor(logging.UnaryServerInterceptor(access, options...), selector.MatchFunc(isLogged)),
		statusUnary, recovery.UnaryServerInterceptor(recoverer), checks.unary,
	}
	stream := []grpc.StreamServerInterceptor{
		func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, h grpc.StreamHandler) error {
			return h(srv, contextStream{ss, withLog(ss.Context())})
		},
		s.metrics.StreamServerInterceptor(),
		selector.StreamServerInterceptor(logging.StreamServerInterceptor(access, options...), selector.MatchFunc(isLogged)),
		statusStream, recovery.StreamServerInterceptor(recoverer), checks.stream,
	}
	return append(unary, s.config.Unary...), append(stream, s.config.Stream...)
}

type contextStream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // a stream's context is reached through the stream
}

// Context returns the stream's context with the values that the server added.
func (s contextStream) Context() context.Context { return s.ctx }

func (s *Server) servers() []*grpc.Server {
	if s.web == nil {
		return []*grpc.Server{s.grpc}
	}
	return []*grpc.Server{s.grpc, s.web}
}

// RegisterService makes Server a grpc.ServiceRegistrar. Call it before Run.
func (s *Server) RegisterService(desc *grpc.ServiceDesc, impl any) {
	for _, server := range s.servers() {
		server.RegisterService(desc, impl)
	}
	s.health.SetServingStatus(desc.ServiceName, healthv1.HealthCheckResponse_NOT_SERVING)
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Health returns the server's health service.
func (s *Server) Health() *health.Server { return s.health }

// SetReady sets the health status of all services: SERVING while the process can do its work, otherwise NOT_SERVING. The
// initial status is NOT_SERVING.
func (s *Server) SetReady(ready bool) {
	state := healthv1.HealthCheckResponse_NOT_SERVING
	if ready {
		state = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", state)
	for name := range s.grpc.GetServiceInfo() {
		s.health.SetServingStatus(name, state)
	}
}

// Run serves until ctx ends. It then refuses new calls, waits for running calls up to the drain timeout, cancels the rest,
// and returns.
func (s *Server) Run(ctx context.Context) error {
	s.metrics.InitializeMetrics(s.grpc)
	served := make(chan error, 1)
	go func() { served <- s.grpc.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving gRPC: %w", err)
	case <-ctx.Done():
	}
	s.health.Shutdown()
	drained := make(chan struct{})
	go func() { defer close(drained); s.grpc.GracefulStop() }()
	timer := time.NewTimer(s.config.DrainTimeout)
	defer timer.Stop()
	select {
	case <-drained:
	case <-timer.C:
		s.grpc.Stop()
		<-drained
	}
	if err := <-served; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		return fmt.Errorf("serving gRPC: %w", err)
	}
	return nil
}

// serverCredentials returns the server's side of TLS. Users may call without a certificate: they have tokens.
func serverCredentials(log logr.Logger, t TLS, users bool) (credentials.TransportCredentials, error) {
	if t.Insecure {
		log.Info("serving plaintext to every caller because of --insecure")
		return insecure.NewCredentials(), nil
	}
	cfg, err := t.ServerConfig(users)
	if err != nil {
		return nil, err
	}
	cfg.NextProtos = []string{"h2"}
	inner := cfg.GetConfigForClient
	cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		c, err := inner(hello)
		if err == nil {
			c.NextProtos = []string{"h2"}
		}
		return c, err
	}
	return gatherCredentials{credentials.NewTLS(cfg)}, nil
}
