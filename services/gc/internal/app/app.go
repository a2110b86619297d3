package app

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/conflict"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
	gcrpc "github.com/fast-sandbox/fast-sandbox/services/gc/internal/rpc"
)

// leaseName is the name of the collectors' Lease.
const leaseName = "fast-sandbox-gc"

// name is the name of this component in Events.
const name = "fast-sandbox-gc"

// App is the wired collectors. Run is called once.
type App struct {
	config    Config
	registry  *prometheus.Registry
	client    kubernetes.Interface
	elector   *leader.Elector // nil without leader election
	gate      *gate
	conflicts *conflict.Checker // nil if no check for other collectors is made
	events    events.EventBroadcaster
	informers informers.SharedInformerFactory // nil if Pods are not collected
	collector *ownergc.Collector
	pods      *podgc.Collector // nil if Pods are not collected
	feed      feed.Feed
	server    *rpc.Server
	enforcing chan struct{} // closed when the first deletion is permitted
	closing   chan struct{} // closed when the process shuts down
}

// Run runs the collectors until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	api, err := clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
	if err != nil {
		return fmt.Errorf("loading --kubeconfig: %w", err)
	}
	a, err := New(ctx, cfg, api)
	if err != nil {
		return err
	}
	return a.Run(ctx)
}

// New wires the collectors for an API server. ctx carries the logger.
func New(ctx context.Context, cfg Config, api *rest.Config) (*App, error) {
	api = rest.CopyConfig(api)
	api.QPS, api.Burst = -1, cfg.KubeBurst // no limit
	if cfg.KubeQPS > 0 {
		api.QPS = float32(cfg.KubeQPS)
	}
	api.UserAgent = name + "/" + daemon.Version()
	api.WarningHandler = rest.NoWarnings{} // deprecated versions are watched too
	client, err := kubernetes.NewForConfig(api)
	if err != nil {
		return nil, fmt.Errorf("creating the Kubernetes client: %w", err)
	}
	clk := clock.RealClock{}
	a := &App{config: cfg, registry: obs.NewRegistry(), client: client, enforcing: make(chan struct{}), closing: make(chan struct{}),
		events: events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()}),
		gate: &gate{leads: func() bool { return true }, clock: clk,
			breaker: breaker.New(breaker.Limit{Share: cfg.MaxShare, Window: cfg.MaxWindow, Floor: cfg.MaxFloor})}}
	if err := a.gate.register(a.registry); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	if err := a.elect(api); err != nil {
		return nil, err
	}
	if cfg.Mode == ModeEnforce && cfg.RivalCheck > 0 {
		a.conflicts = conflict.New(conflict.Config{Client: client, Namespace: cfg.Namespace, Window: cfg.RivalCheck, Period: cfg.RivalCheckPeriod, Clock: clk})
	}
	if err := a.owners(api, clk); err != nil {
		return nil, err
	}
	if cfg.Mode == ModeEnforce && cfg.inScope("") {
		if err := a.finished(clk); err != nil {
			return nil, err
		}
	}
	if err := a.serve(ctx, api, clk); err != nil {
		return nil, err
	}
	return a, nil
}

// serve makes the gRPC server.
func (a *App) serve(ctx context.Context, api *rest.Config, clk clock.PassiveClock) error {
	// A client of its own, so that the collectors' requests do not delay the callers.
	own := rest.CopyConfig(api)
	own.UserAgent += " (authorization)"
	own.QPS = -1
	httpClient, err := rest.HTTPClientFor(own)
	if err != nil {
		return fmt.Errorf("creating the client for authorization: %w", err)
	}
	tokens, authorizer, err := a.config.Access.New(own, httpClient, clk)
	if err != nil {
		return err
	}
	limits, err := limit.New(a.config.Limits, clk, a.registry)
	if err != nil {
		return err
	}
	a.server, err = rpc.NewServer(ctx, rpc.ServerConfig{
		Address: a.config.BindAddress, TLS: a.config.TLS, Registry: a.registry,
		Users: &rpc.Users{Tokens: tokens, Access: authorizer, Rules: gcrpc.Rules(), Proxies: []rpc.Role{rpc.RoleGateway}, Limits: limits},
	})
	if err != nil {
		return err
	}
	gcrpc.New(gcrpc.Config{Collector: a.collector, Guard: a.gate, Feed: &a.feed, Closing: a.closing}).Register(a.server)
	return nil
}

// Addr is where the gRPC server listens.
func (a *App) Addr() net.Addr { return a.server.Addr() }

// elect sets up leader election if the collector enforces and may have replicas.
func (a *App) elect(api *rest.Config) error {
	if a.config.Mode != ModeEnforce || !a.config.LeaderElect {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		return fmt.Errorf("reading the host name: %w", err)
	}
	// A client of its own, so that the collectors' requests do not delay the renewal of the Lease.
	own := rest.CopyConfig(api)
	own.UserAgent += " (leader-election)"
	leases, err := kubernetes.NewForConfig(own)
	if err != nil {
		return fmt.Errorf("creating the client for the Lease: %w", err)
	}
	a.elector = leader.New(leader.Config{Leases: leases.CoordinationV1(), Namespace: a.config.Namespace, Name: leaseName,
		Identity: host + "_" + string(uuid.NewUUID()), Timing: a.config.Lease})
	a.gate.leads = func() bool { return a.elector.Term() > 0 }
	return nil
}

func (a *App) owners(api *rest.Config, clk clock.WithTicker) error {
	meta, err := metadata.NewForConfig(api)
	if err != nil {
		return fmt.Errorf("creating the metadata client: %w", err)
	}
	disco, err := discovery.NewDiscoveryClientForConfig(api)
	if err != nil {
		return fmt.Errorf("creating the discovery client: %w", err)
	}
	a.collector, err = ownergc.New(ownergc.Config{
		Metadata: meta, Discovery: disco, Recorder: a.events.NewRecorder(clientgoscheme.Scheme, name),
		Workers: a.config.Syncs, SyncPeriod: a.config.DiscoveryPeriod, InitialSyncTimeout: a.config.InitialSyncTimeout, Ignored: a.config.ignored(),
		InScope: a.config.inScope, Spares: a.spares, Permit: a.gate.permit, Deleted: a.deleted, Clock: clk, Metrics: a.registry,
	})
	return err
}

func (a *App) finished(clk clock.WithTicker) error {
	a.informers = informers.NewSharedInformerFactoryWithOptions(a.client, 0, informers.WithTransform(podgc.Strip))
	core := a.informers.Core().V1()
	var err error
	a.pods, err = podgc.New(podgc.Config{
		Client: a.client, Pods: core.Pods().Lister(), Nodes: core.Nodes().Lister(), Threshold: a.config.PodThreshold,
		Period: a.config.PodPeriod, Quarantine: a.config.Quarantine, Parallel: a.config.Syncs, Clock: clk, Metrics: a.registry,
		Permit:  func() error { return a.gate.permit(&breaker.Intent{Objects: a.collector.Size().Objects}) },
		Deleted: func(d plan.Deletion) { a.podDeleted(d, clk.Now()) },
	})
	return err
}

// spares reports whether an object is the present canary, which only another collector may delete.
func (a *App) spares(o graph.Object) bool {
	return a.conflicts != nil && o.Kind.Group == "" && a.conflicts.Spares(o.Kind.Kind, o.Namespace, o.Name)
}

func (a *App) deleted(d ownergc.Deletion) {
	a.feed.Publish(feed.Deletion{Object: d.Object, Policy: d.Policy, Cause: string(d.Cause), Time: d.Time})
}

func (a *App) podDeleted(d plan.Deletion, now time.Time) {
	a.feed.Publish(feed.Deletion{Cause: "pod-" + string(d.Reason), Policy: graph.Background, Time: now,
		Object: graph.Object{Kind: graph.Kind{Kind: "Pod"}, Namespace: d.Pod.Namespace, Name: d.Pod.Name, UID: d.Pod.UID, Deleting: d.Pod.Terminating}})
}

// Run runs all parts until ctx ends or one fails.
func (a *App) Run(ctx context.Context) error {
	g := daemon.NewGroup()
	a.config.Serve(g, a.registry, a.server.Health())
	g.Go("gRPC", func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { close(a.closing) })()
		return a.server.Run(ctx)
	})
	g.After("events", func(ctx context.Context) error {
		if err := a.events.StartRecordingToSinkWithContext(ctx); err != nil {
			return fmt.Errorf("recording events: %w", err)
		}
		<-ctx.Done()
		a.events.Shutdown()
		return nil
	})
	g.Go("collector", a.collector.Run)
	g.Go("readiness", a.ready)
	if a.config.Mode == ModeEnforce {
		g.Go("enforcement", a.enforce)
		g.Go("breaker", a.gate.remind)
	}
	if a.conflicts != nil && a.config.RivalCheckPeriod > 0 {
		g.Go("conflicts", a.watchConflicts)
	}
	if a.elector != nil {
		g.Go("election", a.elector.Run)
	}
	return g.Run(ctx)
}

// ready reports readiness once the graph is complete. A standby is as ready as the leader: it can take over.
func (a *App) ready(ctx context.Context) error {
	select {
	case <-a.collector.Synced():
		a.server.SetReady(true)
		<-ctx.Done()
	case <-ctx.Done():
	}
	return nil
}

// enforce waits until this process leads, checks that no other collector is active, and then collects until ctx ends.
func (a *App) enforce(ctx context.Context) error {
	log := logr.FromContextOrDiscard(ctx)
	if a.informers != nil {
		// The informers need their own context: this function can return while ctx lasts, and waits for them.
		watching, stop := context.WithCancel(ctx)
		defer a.informers.Shutdown()
		defer stop()
		a.informers.Start(watching.Done())
	}
	if !a.turn(ctx) {
		return nil
	}
	if a.conflicts != nil {
		err := a.conflicts.Check(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
	}
	a.gate.open.Store(true)
	close(a.enforcing)
	log.Info("collecting", obs.KeyScope, a.config.Scope, obs.KeyObjects, a.collector.Size().Objects)
	a.collector.Resume(ctx)
	if a.pods != nil {
		// If Pods or nodes cannot be listed, the owner collector still works.
		a.informers.WaitForCacheSync(ctx.Done())
		return a.pods.Run(ctx)
	}
	<-ctx.Done()
	return nil
}

// watchConflicts keeps looking for another collector once this process deletes. If there is one, the process ends, and the check
// at its next start keeps it from deleting anything.
func (a *App) watchConflicts(ctx context.Context) error {
	select {
	case <-a.enforcing:
	case <-ctx.Done():
		return nil
	}
	return a.conflicts.Watch(ctx, func(err error) {
		logr.FromContextOrDiscard(ctx).Error(err, "checking for another garbage collector")
	})
}

// turn waits until the graph is complete and this process leads. It returns false if ctx ends first.
func (a *App) turn(ctx context.Context) bool {
	select {
	case <-a.collector.Synced():
	case <-ctx.Done():
		return false
	}
	if a.elector == nil {
		return true
	}
	for {
		state, changed := a.elector.State()
		if state.Term > 0 {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}
