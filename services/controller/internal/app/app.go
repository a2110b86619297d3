package app

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	crmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/informer"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/certmanager"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/issuer"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/sandbox"
)

// Run runs the controller until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	rest, err := clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
	if err != nil {
		return fmt.Errorf("loading --kubeconfig: %w", err)
	}
	rest.QPS, rest.Burst = float32(cfg.KubeQPS), cfg.KubeBurst
	rest.UserAgent = "fast-sandbox-controller/" + daemon.Version()
	allocator, err := rpc.Dial(cfg.AllocatorAddress, rpc.ClientConfig{TLS: cfg.TLS, ServerName: rpc.RoleAllocator.ServerName()})
	if err != nil {
		return fmt.Errorf("connecting to --allocator-address: %w", err)
	}
	defer func() { _ = allocator.Close() }() // fails only if it is already closed
	registry := prometheus.NewRegistry()     // controller-runtime's registry, which is served too, has the metrics of the process
	m, err := Manager(ctx, cfg, rest, allocatorv1.NewAllocatorServiceClient(allocator), registry)
	if err != nil {
		return err
	}
	status := health.NewServer()
	status.SetServingStatus("", healthv1.HealthCheckResponse_NOT_SERVING)
	g := daemon.NewGroup()
	cfg.Serve(g, prometheus.Gatherers{registry, crmetrics.Registry}, status)
	g.Go("manager", m.Start)
	g.Go("readiness", func(ctx context.Context) error {
		// A standby is ready, too: it can take over.
		if m.GetCache().WaitForCacheSync(ctx) {
			status.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
		}
		<-ctx.Done()
		status.Shutdown()
		return nil
	})
	return g.Run(ctx)
}

// Option is a hook for tests.
type Option func(*options)

type options struct{ clock clock.Clock }

// WithClock makes the controllers use another clock, for example one that differs from that of the agents.
func WithClock(c clock.Clock) Option { return func(o *options) { o.clock = c } }

// Manager returns a manager with both controllers, which is not started. It closes the connections to agents when it ends.
func Manager(ctx context.Context, cfg Config, rest *rest.Config, allocator allocatorv1.AllocatorServiceClient, registry prometheus.Registerer, opts ...Option) (manager.Manager, error) {
	o := options{clock: clock.RealClock{}}
	for _, opt := range opts {
		opt(&o)
	}
	clk := o.clock
	client := rpc.ClientConfig{TLS: cfg.TLS}
	var lock *leader.Lock
	if cfg.LeaderElect {
		var err error
		if lock, err = newLock(cfg, rest); err != nil {
			return nil, err
		}
		client.Leader = lock
	}
	m, err := newManager(ctx, cfg, rest, lock)
	if err != nil {
		return nil, err
	}
	index := agents.NewIndex(clk)
	conns := agents.NewConns(client, clk)
	if err := m.Add(&agents.Watcher{Allocator: allocator, Index: index, Conns: conns, Clock: clk}); err != nil {
		return nil, fmt.Errorf("adding the agent watcher: %w", err)
	}
	if err := m.Add(manager.RunnableFunc(func(ctx context.Context) error {
		<-ctx.Done()
		return conns.Close()
	})); err != nil {
		return nil, fmt.Errorf("adding the connections: %w", err)
	}
	recorder := m.GetEventRecorder("fast-sandbox-controller")
	sandboxes, err := sandbox.New(sandbox.Config{
		Client: m.GetClient(), Live: m.GetAPIReader(), Allocator: allocator, Agents: conns, Index: index, Recorder: recorder,
		Clock: clk, Workers: cfg.MaxReconciles, Metrics: registry,
		Timing: sandbox.Timing{Requeue: cfg.RequeueInterval,
			DeletionPoll: cfg.DeletionPoll, ExpirationThreshold: cfg.ExpirationCheck},
	})
	if err != nil {
		return nil, err
	}
	if err := fields.Register(ctx, m.GetFieldIndexer()); err != nil {
		return nil, err
	}
	if err := sandboxes.SetupWithManager(m); err != nil {
		return nil, err
	}
	pools, err := pool.New(pool.Config{
		Client: m.GetClient(), Live: m.GetAPIReader(), Index: index, Agents: conns, Recorder: recorder, Clock: clk,
		Issuer: newIssuer(cfg, m), Requeue: cfg.RequeueInterval, ShrinkDelay: cfg.ShrinkDelay, Metrics: registry,
		Injection: pool.Injection{
			AgentPort: cfg.AgentPort, ContainerdSocket: cfg.ContainerdSocket, ContainerdRoot: cfg.ContainerdRoot, LogRoot: cfg.LogRoot, SlotRoot: cfg.SlotRoot,
			Insecure: cfg.TLS.Insecure, Env: telemetryEnv(),
		},
	})
	if err != nil {
		return nil, err
	}
	return m, pools.SetupWithManager(m)
}

func newIssuer(cfg Config, m manager.Manager) pool.Issuer {
	if cfg.AgentCertificates == byCertManager {
		kind, name, _ := certmanager.ParseIssuer(cfg.AgentIssuer) // Validate has parsed it
		return certmanager.New(certmanager.Config{Client: m.GetClient(), Live: m.GetAPIReader(), Kind: kind, Name: name, TrustFile: cfg.TLS.CAFile, Life: cfg.AgentCertLife})
	}
	return issuer.New(issuer.Config{CertFile: cfg.AgentCACertFile, KeyFile: cfg.AgentCAKeyFile, TrustFile: cfg.TLS.CAFile, Life: cfg.AgentCertLife})
}

func newManager(ctx context.Context, cfg Config, rest *rest.Config, lock *leader.Lock) (manager.Manager, error) {
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("registering types: %w", err)
	}
	opts := manager.Options{
		Scheme: scheme,
		Logger: logr.FromContextOrDiscard(ctx),
		// Of Pods, the cache has only those of agents.
		Cache: cache.Options{ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: {Label: labels.SelectorFromSet(labels.Set{v1alpha1.LabelComponent: v1alpha1.ComponentAgent})},
		}, NewInformer: informer.New, DefaultTransform: cache.TransformStripManagedFields()},
		LeaderElection: cfg.LeaderElect, LeaderElectionID: leaseName, LeaderElectionReleaseOnCancel: true,
		LeaseDuration: &cfg.Lease.LeaseDuration, RenewDeadline: &cfg.Lease.RenewDeadline, RetryPeriod: &cfg.Lease.RetryPeriod,
		Metrics:                 metricsserver.Options{BindAddress: "0"},
		HealthProbeBindAddress:  "0",
		GracefulShutdownTimeout: ptr.To(10 * time.Second),
		Controller:              crconfig.Controller{SkipNameValidation: ptr.To(true)},
		// The context has the logger, but does not end with ctx: the manager stops its runnables in order.
		BaseContext: func() context.Context { return context.WithoutCancel(ctx) },
	}
	if lock != nil { // a nil lock would make a non-nil interface
		opts.LeaderElectionResourceLockInterface = lock
	}
	m, err := manager.New(rest, opts)
	if err != nil {
		return nil, fmt.Errorf("creating the manager: %w", err)
	}
	return m, nil
}

// telemetryEnv returns the telemetry settings of agents: those of this process, under the agents' own service name.
func telemetryEnv() []corev1.EnvVar {
	var out []corev1.EnvVar
	for _, kv := range obs.SharedEnviron() {
		name, value, _ := strings.Cut(kv, "=")
		out = append(out, corev1.EnvVar{Name: name, Value: value})
	}
	return append(out, corev1.EnvVar{Name: "OTEL_SERVICE_NAME", Value: "agent"})
}
