package app

import (
	"context"
	"fmt"
	"net/http"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	janitorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/janitor/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/idrange"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/shim"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	janitorrpc "github.com/fast-sandbox/fast-sandbox/janitor/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/sweep"
)

// parts is everything that Run creates.
type parts struct {
	registry *prometheus.Registry
	state    *observe.NodeState
	sweeper  *sweep.Sweeper
	source   *source
	events   events.EventBroadcaster
	server   *rpc.Server
	closing  chan struct{}
}

// Run runs the janitor until ctx ends. It starts, and follows the node, even if the API server does not answer; nothing is deleted
// before all of the API server's Pods and Sandboxes were received.
func Run(ctx context.Context, cfg *Config) error {
	c, err := clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
	if err != nil {
		return fmt.Errorf("loading --kubeconfig: %w", err)
	}
	return run(ctx, cfg, c)
}

func run(ctx context.Context, cfg *Config, api *rest.Config) error {
	containerd, err := ctrd.Dial(cfg.ContainerdSocket, cfg.ContainerdNamespace)
	if err != nil {
		return err
	}
	defer containerd.Close()
	remover := &ctrd.Remover{
		Client: containerd, Snapshotter: cfg.Snapshotter, LogRoot: cfg.LogRoot, Ranges: idrange.Ranges{Dir: cfg.IDRoot}, ProcRoot: cfg.ProcRoot, CgroupRoot: cfg.CgroupRoot,
		FIFORoot: cfg.FIFORoot, HostProc: cfg.HostProc, StateDir: cfg.StateDir, CgroupParents: cfg.CgroupParents, KeepLog: cfg.Policy.LogRetention > 0,
	}
	p, err := build(ctx, cfg, api, remover)
	if err != nil {
		return err
	}
	g := daemon.NewGroup()
	g.Go("gRPC", func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { close(p.closing) })()
		return p.server.Run(ctx)
	})
	g.Go("sweeper", p.sweeper.Run)
	g.Go("state", p.state.Run)
	g.Go("logs", func(ctx context.Context) error { return trimLogs(ctx, cfg.LogRoot, clock.RealClock{}) })
	if cfg.SlotRoot != "" {
		collector := shim.NewCollector(shim.Config{Dir: cfg.SlotRoot, InUse: remover.ShimsInUse, Grace: cfg.Policy.LeftoverGrace, Clock: clock.RealClock{}})
		g.Go("shims", func(ctx context.Context) error {
			return collectShims(ctx, collector, cfg.ScanInterval, clock.RealClock{})
		})
	}
	g.Go("readiness", p.readiness)
	g.After("informers", p.source.run)
	g.After("events", func(ctx context.Context) error {
		if err := p.events.StartRecordingToSinkWithContext(ctx); err != nil {
			return fmt.Errorf("recording events: %w", err)
		}
		<-ctx.Done()
		p.events.Shutdown()
		return nil
	})
	cfg.Serve(g, p.registry, p.server.Health())
	logr.FromContextOrDiscard(ctx).Info("janitor listening", obs.KeyAddress, p.server.Addr().String(), obs.KeyNode, cfg.NodeName)
	return g.Run(ctx)
}

// build creates the parts.
func build(ctx context.Context, cfg *Config, api *rest.Config, remover *ctrd.Remover) (*parts, error) {
	log := logr.FromContextOrDiscard(ctx)
	api = rest.CopyConfig(api)
	api.UserAgent = "fast-sandbox-janitor/" + daemon.Version()
	api.QPS, api.Burst = float32(cfg.KubeQPS), cfg.KubeBurst
	httpClient, err := rest.HTTPClientFor(api)
	if err != nil {
		return nil, fmt.Errorf("creating the client for the API server: %w", err)
	}
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("registering types: %w", err)
		}
	}
	direct, err := client.New(api, client.Options{HTTPClient: httpClient, Scheme: scheme, Mapper: kinds()})
	if err != nil {
		return nil, fmt.Errorf("creating the client for the API server: %w", err)
	}
	sink, err := eventsv1.NewForConfigAndClient(api, httpClient)
	if err != nil {
		return nil, fmt.Errorf("creating the client for Events: %w", err)
	}
	p := &parts{registry: obs.NewRegistry(), closing: make(chan struct{}), events: events.NewBroadcaster(&events.EventSinkImpl{Interface: sink})}
	seen, err := observe.NewMetrics(p.registry)
	if err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	swept, err := sweep.NewMetrics(p.registry)
	if err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	p.state = observe.New(observe.Config{
		Node: &observe.Containerd{Remover: remover}, API: observe.NewLive(direct, cfg.NodeName), Policy: cfg.Policy, ScanInterval: cfg.ScanInterval,
		Orphan: func(k observe.Key) { p.sweeper.Add(k) }, Metrics: seen, Log: log.WithName("observe"),
	})
	p.sweeper = sweep.New(sweep.Config{
		Judge: p.state, Remover: remover, Policy: cfg.Policy, Workers: cfg.Workers, Metrics: swept, Log: log.WithName("sweep"),
		Report: sweep.Reporter(p.events.NewRecorder(scheme, "fast-sandbox-janitor"), cfg.NodeName),
	})
	if p.source, err = newSource(p.state, api, scheme, httpClient, cfg.NodeName); err != nil {
		return nil, err
	}
	return p, p.serve(ctx, cfg, api, httpClient)
}

// serve creates the server.
func (p *parts) serve(ctx context.Context, cfg *Config, api *rest.Config, httpClient *http.Client) error {
	tokens, authorizer, err := cfg.Access.New(api, httpClient, clock.RealClock{})
	if err != nil {
		return err
	}
	limits, err := limit.New(cfg.Limits, clock.RealClock{}, p.registry)
	if err != nil {
		return err
	}
	p.server, err = rpc.NewServer(ctx, rpc.ServerConfig{
		Address: cfg.BindAddress, TLS: cfg.TLS, Registry: p.registry,
		Users: &rpc.Users{Tokens: tokens, Access: authorizer, Rules: janitorrpc.Rules(), Limits: limits},
	})
	if err != nil {
		return err
	}
	janitorv1.RegisterJanitorServiceServer(p.server, janitorrpc.New(janitorrpc.Config{
		Core: core{p.state, p.sweeper}, NodeName: cfg.NodeName,
	}, p.closing))
	return nil
}

// readiness reports readiness once everything was listed: before that, nothing is swept.
func (p *parts) readiness(ctx context.Context) error {
	for !p.state.Ready() {
		changed := p.state.Changed()
		if p.state.Ready() {
			break
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
	p.server.SetReady(true)
	<-ctx.Done()
	return nil
}
