// Package app assembles the allocator: it creates the parts, feeds them from the API server, serves, and shuts down in order. It
// owns no state of its own. Run is called once for each App; tests may run several side by side.
package app

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	eventsv1 "k8s.io/client-go/kubernetes/typed/events/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	authv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/auth/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/daemon"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/limit"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/access"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/announce"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/forward"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/membership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/quota"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/refusal"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	allocatorrpc "github.com/fast-sandbox/fast-sandbox/services/allocator/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

// drainTime is how long the shutdown waits for custom resources that are not written yet. The next process adopts the rest.
const drainTime = 5 * time.Second

// App is one allocator.
type App struct {
	config   Config
	rest     *rest.Config
	listener net.Listener
	clock    clock.WithTickerAndDelayedExecution
}

// Option changes an App for tests.
type Option func(*App)

// WithREST replaces --kubeconfig.
func WithREST(c *rest.Config) Option { return func(a *App) { a.rest = c } }

// WithListener replaces --bind-address.
func WithListener(l net.Listener) Option { return func(a *App) { a.listener = l } }

// WithClock replaces the system clock.
func WithClock(c clock.WithTickerAndDelayedExecution) Option { return func(a *App) { a.clock = c } }

// New returns an allocator with valid settings. It reads the kubeconfig and does no other I/O.
func New(cfg Config, options ...Option) (*App, error) {
	a := &App{config: cfg, clock: clock.RealClock{}}
	for _, o := range options {
		o(a)
	}
	if a.rest == nil {
		c, err := clientcmd.BuildConfigFromFlags("", cfg.Kubeconfig)
		if err != nil {
			return nil, fmt.Errorf("reading --kubeconfig: %w", err)
		}
		a.rest = c
	}
	a.rest = rest.CopyConfig(a.rest)
	a.rest.UserAgent = "fast-sandbox-allocator/" + daemon.Version()
	a.rest.QPS = -1 // the write queue is bounded, and the API server has its own fairness
	return a, nil
}

// parts is everything that Run creates.
type parts struct {
	metrics  *prometheus.Registry
	tasks    *tasks.Set
	registry *registry.Registry
	store    *store.Store
	pools    *pools.Pools
	quotas   *quota.Quotas
	fleet    *fleet.Fleet
	feed     *feed.Feed
	members  *membership.Members
	fastpath *fastpath.Server
	server   *rpc.Server
	source   *source
	synced   chan struct{} // closed when the informers have listed all objects
	fill     chan struct{} // closed when all of the custom resources may be read
	events   events.EventBroadcaster
	recorder events.EventRecorder
	// elector is nil for an allocator that runs alone.
	elector  *leader.Elector
	identity leadership.Identity
	lead     *leadership.View
	announce *announce.Announcer
	forward  *forward.Forwarder
}

// Run serves until ctx ends, or until this replica loses leadership. It also serves while the API server is unreachable. Probes
// return SERVING once the informers have synced, on every replica: one that does not lead forwards its calls. The Lease is
// released after the last call was answered and the pending writes were made, so that the next leader finds nothing unfinished.
func (a *App) Run(ctx context.Context) error {
	p, err := a.build(ctx)
	if err != nil {
		return err
	}
	background := p.tasks.Run
	g := daemon.NewGroup()
	g.Go("grpc", func(ctx context.Context) error {
		defer context.AfterFunc(ctx, p.forward.End)()
		return p.server.Run(ctx)
	})
	g.Go("recovery", p.fastpath.Recover)
	g.Go("announcements", p.announce.Run)
	g.Go("readiness", func(ctx context.Context) error { return a.sweep(ctx, p) })
	g.After("informers", func(ctx context.Context) error {
		return p.source.run(ctx, func() {
			p.server.SetReady(true)
			close(p.synced)
		})
	})
	g.Go("start", func(ctx context.Context) error { return a.start(ctx, p) })
	g.After("agents", func(ctx context.Context) error { return after(ctx, p.drain, p.feed.Run) })
	g.After("background", func(ctx context.Context) error { return after(ctx, p.drain, background) })
	if p.elector != nil {
		g.Go("leader", func(ctx context.Context) error { return a.watchLeader(ctx, p) })
		g.After("election", func(ctx context.Context) error { return a.campaign(ctx, p) })
	}
	g.After("events", func(ctx context.Context) error {
		if err := p.events.StartRecordingToSinkWithContext(ctx); err != nil {
			return fmt.Errorf("recording events: %w", err)
		}
		<-ctx.Done()
		p.events.Shutdown()
		return nil
	})
	a.config.Serve(g, p.metrics, p.server.Health())
	defer p.forward.Close()
	return g.Run(ctx)
}

// after runs f. When ctx ends, it runs last and then ends f.
func after(ctx context.Context, last func(context.Context), f func(context.Context) error) error {
	inner, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- f(inner) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	last(inner)
	cancel()
	return <-ended
}

// drain waits for pending writes, for a limited time.
func (p *parts) drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	p.fastpath.Drain(ctx)
}

// sweep publishes the status of agents every second.
func (a *App) sweep(ctx context.Context, p *parts) error {
	ticker := a.clock.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			p.fleet.Sweep()
		}
	}
}

func (a *App) build(ctx context.Context) (*parts, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return nil, fmt.Errorf("creating the scheme: %w", err)
		}
	}
	httpClient, err := rest.HTTPClientFor(a.rest)
	if err != nil {
		return nil, fmt.Errorf("creating the API server client: %w", err)
	}
	mapper := kinds()
	direct, err := client.New(a.rest, client.Options{HTTPClient: httpClient, Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("creating the API server client: %w", err)
	}
	p := &parts{metrics: obs.NewRegistry(), tasks: tasks.New(), registry: registry.New(a.config.HeartbeatTimeout, 0), store: store.New(a.clock), pools: pools.New(),
		synced: make(chan struct{}), fill: make(chan struct{})}
	if err := a.elect(p, httpClient); err != nil {
		return nil, err
	}
	p.quotas = quota.New(p.registry)
	p.store.CountIn(p.registry)
	if err := a.connect(ctx, p, scheme, httpClient); err != nil {
		return nil, err
	}
	sign, err := a.signer()
	if err != nil {
		return nil, err
	}
	p.fastpath = fastpath.New(fastpath.Config{
		Store: p.store, Fleet: p.fleet, Agents: p.feed, Events: p.recorder, Leadership: p.lead, Announced: p.announce.Announced, Traced: obs.Exporting(), Pools: p.pools, Resources: direct, Tasks: p.tasks, Clock: a.clock,
		Metrics: fastpath.NewMetrics(p.metrics), Mode: a.config.mode(), OrphanTimeout: a.config.OrphanTimeout,
		CreateTimeout: a.config.CreateTimeout, WriteLimit: a.config.WriteQueueLimit, Sign: sign,
	})
	registerGauges(p, a.clock)
	if p.source, err = newSource(a, p, scheme, mapper, httpClient); err != nil {
		return nil, err
	}
	return p, a.serve(ctx, p, httpClient)
}

// connect creates what the allocator knows of agents, and its connections to them.
func (a *App) connect(ctx context.Context, p *parts, scheme *runtime.Scheme, httpClient *http.Client) error {
	if err := a.record(p, scheme, httpClient); err != nil {
		return err
	}
	refusals, err := refusal.New(refusal.Config{Events: p.recorder, Metrics: p.metrics, Log: logr.FromContextOrDiscard(ctx), Clock: a.clock})
	if err != nil {
		return err
	}
	p.fleet = fleet.New(p.registry, a.clock, p.store, refusals)
	p.announce = announce.New(announce.Config{
		Lead: p.lead, Client: func(uid string) (agentv1.AgentServiceClient, bool) { return p.feed.Client(uid) }, Tasks: p.tasks, Clock: a.clock,
	})
	p.feed = feed.New(feed.Config{Sink: sink{p.fleet, p.announce}, Dial: func(agent *agentv1.AgentInfo, address string) (*grpc.ClientConn, error) {
		return rpc.Dial(address, rpc.ClientConfig{TLS: a.config.TLS, AgentUID: agent.GetPodUid(), Leader: p.lead})
	}, Clock: a.clock})
	p.members = membership.New(membership.Config{Feed: p.feed, Address: a.agentAddress, Refused: refusals.Refused})
	return nil
}

func (a *App) serve(ctx context.Context, p *parts, httpClient *http.Client) error {
	const sandbox, allocator = "fastsandbox.sandbox.v1.SandboxService", "fastsandbox.allocator.v1.AllocatorService"
	p.forward = forward.New(forward.Config{
		Lead: p.lead, Clock: a.clock, Services: []string{sandbox, allocator}, Dial: a.dialReplica,
	})
	tokens, authorizer, err := a.config.Access.New(a.rest, httpClient, a.clock)
	if err != nil {
		return err
	}
	core, err := corev1client.NewForConfigAndClient(a.rest, httpClient)
	if err != nil {
		return fmt.Errorf("creating the API server client: %w", err)
	}
	limits, err := limit.New(a.config.Limits, a.clock, p.metrics)
	if err != nil {
		return err
	}
	p.server, err = rpc.NewServer(ctx, rpc.ServerConfig{
		Address: a.config.BindAddress, Listener: a.listener, TLS: a.config.TLS, Registry: p.metrics,
		// A replica forwards the calls of the controller and the gateway on its own behalf, and those of users on theirs.
		Allow: map[string][]rpc.Role{
			allocator: {rpc.RoleController, rpc.RoleAllocator},
			allocatorv1.AllocatorService_LocateSandbox_FullMethodName: {rpc.RoleGateway, rpc.RoleAllocator},
			// The gateway asks all agents of a namespace what their sandboxes use.
			allocatorv1.AllocatorService_ListAgents_FullMethodName: {rpc.RoleController, rpc.RoleGateway, rpc.RoleAllocator},
		},
		Users: &rpc.Users{
			Tokens: tokens, Access: authorizer, Rules: access.Rules(), Proxies: []rpc.Role{rpc.RoleGateway, rpc.RoleAllocator}, Limits: limits,
		},
		Unary: []grpc.UnaryServerInterceptor{p.forward.Unary}, Stream: []grpc.StreamServerInterceptor{p.forward.Stream},
	})
	if err != nil {
		return err
	}
	sandboxv1.RegisterSandboxServiceServer(p.server, p.fastpath)
	authv1.RegisterAuthServiceServer(p.server, access.New(access.Config{
		Authorizer: authorizer, Core: core, KeyNamespace: a.config.Access.KeyNamespace, Clock: a.clock,
	}))
	allocatorv1.RegisterAllocatorServiceServer(p.server, allocatorrpc.New(allocatorrpc.Config{
		Sandboxes: p.fastpath, Fleet: p.fleet, Pools: p.pools, Agents: p.feed, Clock: a.clock, HeartbeatTimeout: a.config.HeartbeatTimeout,
	}))
	return nil
}

// signer returns the function that signs tickets with the key of this process's certificate.
func (a *App) signer() (func(auth.Ticket) (string, error), error) {
	if a.config.TLS.Insecure {
		return func(auth.Ticket) (string, error) {
			return "", fault.New(errdefs.ErrFailedPrecondition, fault.Unauthenticated, "there are no tickets without TLS")
		}, nil
	}
	own, err := a.config.TLS.Identity()
	if err != nil {
		return nil, err
	}
	return func(t auth.Ticket) (string, error) {
		cert, _, err := own.Current()
		if err != nil {
			return "", err
		}
		return t.Sign(cert.PrivateKey, cert.Certificate)
	}, nil
}

func (a *App) agentAddress(ip string) string {
	return net.JoinHostPort(ip, strconv.Itoa(a.config.AgentPort))
}

// record creates the recorder of Events, which writes them in the background.
func (a *App) record(p *parts, scheme *runtime.Scheme, httpClient *http.Client) error {
	c, err := eventsv1.NewForConfigAndClient(a.rest, httpClient)
	if err != nil {
		return fmt.Errorf("creating the events client: %w", err)
	}
	p.events = events.NewBroadcaster(&events.EventSinkImpl{Interface: c})
	p.recorder = p.events.NewRecorder(scheme, "fast-sandbox-allocator")
	return nil
}

// kinds returns the kinds that the allocator uses, so that it needs no discovery and starts without an API server.
func kinds() meta.RESTMapper {
	m := meta.NewDefaultRESTMapper(nil)
	m.Add(corev1.SchemeGroupVersion.WithKind("Pod"), meta.RESTScopeNamespace)
	// The mapper would not guess the plural of Sandbox.
	m.AddSpecific(v1alpha1.GroupVersion.WithKind("Sandbox"), v1alpha1.GroupVersion.WithResource("sandboxes"),
		v1alpha1.GroupVersion.WithResource("sandbox"), meta.RESTScopeNamespace)
	m.Add(v1alpha1.GroupVersion.WithKind("SandboxPool"), meta.RESTScopeNamespace)
	m.Add(corev1.SchemeGroupVersion.WithKind("Namespace"), meta.RESTScopeRoot)
	m.Add(corev1.SchemeGroupVersion.WithKind("ResourceQuota"), meta.RESTScopeNamespace)
	return m
}
