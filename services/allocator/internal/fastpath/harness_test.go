package fastpath_test

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeapi"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/leadership"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/pools"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/tasks"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	ns   = "default"
	pool = "default"
	wait = testkit.Timeout
	tick = testkit.Tick
)

// api is an API server whose calls can be made to fail.
type api struct {
	*fakeapi.Server

	down     atomic.Bool  // calls do not reach it
	starting atomic.Bool  // it refuses every user
	mute     atomic.Bool  // creates are carried out and their answers are lost
	onCreate atomic.Value // func(*v1alpha1.Sandbox)
	onUpdate atomic.Value // func()
	creates  atomic.Int64
}

func newAPI(t *testing.T) *api {
	t.Helper()
	a := &api{Server: fakeapi.New(t)}
	a.Before(func(verb fakeapi.Verb, obj client.Object) error {
		switch {
		case verb == fakeapi.Update:
			if f, ok := a.onUpdate.Load().(func()); ok {
				f()
			}
			return nil
		case a.down.Load():
			return fakeapi.Refused()
		case a.starting.Load():
			return fakeapi.Unauthorized()
		case verb == fakeapi.Create:
			if f, ok := a.onCreate.Load().(func(*v1alpha1.Sandbox)); ok {
				f(obj.(*v1alpha1.Sandbox))
			}
			a.creates.Add(1)
		}
		return nil
	})
	a.After(func(verb fakeapi.Verb, _ client.Object) error {
		if verb == fakeapi.Create && a.mute.Load() {
			return context.DeadlineExceeded
		}
		return nil
	})
	return a
}

// mesh is an allocator with fake agents and a fake API server.
type mesh struct {
	t        *testing.T
	api      *api
	agents   map[string]*fakeagent.Agent
	pipes    map[string]*bufconn.Listener
	cancels  map[string]context.CancelFunc
	server   *fastpath.Server
	config   fastpath.Config
	store    *store.Store
	fleet    *fleet.Fleet
	feed     *feed.Feed
	registry *registry.Registry
	sandbox  sandboxv1.SandboxServiceClient
	stop     func()
	blind    atomic.Bool // the informer is behind: it shows nothing
	outlined atomic.Bool // a start reads metadata alone
}

type option func(*fastpath.Config)

func newMesh(t *testing.T, options ...option) *mesh {
	t.Helper()
	m := &mesh{t: t, api: newAPI(t), agents: map[string]*fakeagent.Agent{}, pipes: map[string]*bufconn.Listener{}, cancels: map[string]context.CancelFunc{}}
	m.start(options...)
	t.Cleanup(func() {
		m.stop()
		for _, cancel := range m.cancels {
			cancel()
		}
	})
	return m
}

// start boots an allocator; a second one after stop is a restart.
func (m *mesh) start(options ...option) {
	t := m.t
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	c := clock.RealClock{}
	m.store, m.registry = store.New(c), registry.New(0, 0)
	m.fleet = fleet.New(m.registry, c, m.store, nil)
	m.feed = feed.New(feed.Config{Sink: m.fleet, Clock: c, Dial: m.dial})
	p := pools.New()
	p.Set(&v1alpha1.SandboxPool{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: pool}})
	set := tasks.New()
	cfg := fastpath.Config{
		Store: m.store, Fleet: m.fleet, Agents: m.feed, Pools: p, Resources: m.api, Tasks: set, Clock: c,
		Metrics: fastpath.NewMetrics(prometheus.NewRegistry()), Mode: sandboxv1.ConsistencyMode_CONSISTENCY_MODE_FAST,
		Leadership: leadership.Alone(), Announced: func(string) bool { return true },
		OrphanTimeout: 100 * time.Millisecond, CreateTimeout: 5 * time.Second, WriteLimit: 100,
	}
	for _, o := range options {
		o(&cfg)
	}
	m.server, m.config = fastpath.New(cfg), cfg
	pipe := bufconn.Listen(1 << 20)
	server, err := rpc.NewServer(ctx, rpc.ServerConfig{Listener: pipe, TLS: rpc.TLS{Insecure: true}, DrainTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	sandboxv1.RegisterSandboxServiceServer(server, m.server)
	synced := make(chan struct{})
	for _, run := range []func(context.Context) error{set.Run, m.feed.Run, server.Run, m.server.Recover, func(ctx context.Context) error { return m.inform(ctx, synced) }} {
		wg.Go(func() { _ = run(ctx) })
	}
	<-synced
	p.SetSynced()
	m.feed.SetSynced()
	conn, err := grpc.NewClient("passthrough:///allocator", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return pipe.DialContext(ctx) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(64<<20)))
	require.NoError(t, err)
	m.sandbox = sandboxv1.NewSandboxServiceClient(conn)
	for uid := range m.agents {
		m.join(uid)
	}
	m.stop = func() {
		_ = conn.Close()
		cancel()
		wg.Wait()
		m.stop = func() {}
	}
}

func (m *mesh) dial(_ *agentv1.AgentInfo, address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return m.pipes[address].DialContext(ctx) }))
}

// inform stands for the informer, and for the controller as far as the finalizer goes.
func (m *mesh) inform(ctx context.Context, synced chan struct{}) error {
	w, err := m.api.Watch(ctx, &v1alpha1.SandboxList{})
	if err != nil {
		return err
	}
	defer w.Stop()
	list := &v1alpha1.SandboxList{}
	if err := m.api.List(ctx, list); err != nil {
		return err
	}
	for i := range list.Items {
		if m.blind.Load() {
			break
		}
		if m.outlined.Load() {
			m.server.ResourceOutlined(&v1alpha1.Sandbox{ObjectMeta: list.Items[i].ObjectMeta})
			continue
		}
		m.server.ResourceSeen(&list.Items[i])
	}
	close(synced)
	terminating := map[string]*v1alpha1.Sandbox{}
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-w.ResultChan():
			sb, ok := event.Object.(*v1alpha1.Sandbox)
			switch {
			case !ok, m.blind.Load():
			case event.Type == watch.Deleted:
				delete(terminating, sb.Name)
				m.server.ResourceGone(sb)
			default:
				m.server.ResourceSeen(sb)
				if sb.DeletionTimestamp != nil {
					terminating[sb.Name] = sb
				}
			}
		case <-ticker.C:
			for name, sb := range terminating {
				if !m.running(sb.EffectiveUID()) {
					sb = sb.DeepCopy()
					sb.Finalizers = nil
					if err := m.api.Update(ctx, sb); err == nil || apierrors.IsNotFound(err) {
						delete(terminating, name)
					}
				}
			}
		}
	}
}

func (m *mesh) running(uid string) bool {
	for _, a := range m.agents {
		for _, r := range a.Sandboxes() {
			if r.GetRecord().GetFence().GetSandboxUid() == uid {
				return true
			}
		}
	}
	return false
}

// agent adds an agent and waits until the registry has it.
func (m *mesh) agent(uid string, capacity int32, script func(*fakeagent.Agent)) *fakeagent.Agent {
	m.t.Helper()
	a := fakeagent.New(&agentv1.AgentInfo{PodName: "pod-" + uid, PodUid: uid, Namespace: ns, Pool: pool, NodeName: "node", PodIp: "10.0.0.1", Capacity: capacity})
	if script != nil {
		script(a)
	}
	m.agents[uid] = a
	m.pipes[uid] = bufconn.Listen(1 << 20)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = a.Serve(ctx, m.pipes[uid], rpc.TLS{Insecure: true})
	}()
	m.cancels[uid] = func() { cancel(); <-done }
	m.join(uid)
	return a
}

func (m *mesh) join(uid string) {
	m.t.Helper()
	m.feed.SetPod(&agentv1.AgentInfo{PodName: "pod-" + uid, PodUid: uid, Namespace: ns, Pool: pool, NodeName: "node"}, uid)
	require.Eventually(m.t, func() bool {
		a, ok := m.fleet.Agent(uid)
		return ok && a.GetReady()
	}, wait, tick)
}

func (m *mesh) create(req *sandboxv1.CreateSandboxRequest) (*sandboxv1.CreateSandboxResponse, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	resp, err := m.sandbox.CreateSandbox(ctx, req)
	return resp, rpc.FromStatus(err)
}

func (m *mesh) remove(name string) error {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	_, err := m.sandbox.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: name})
	return rpc.FromStatus(err)
}

func (m *mesh) get(name string) (*sandboxv1.Sandbox, error) {
	resp, err := m.sandbox.GetSandbox(context.Background(), &sandboxv1.GetSandboxRequest{Namespace: ns, Name: name})
	return resp.GetSandbox(), rpc.FromStatus(err)
}

func (m *mesh) resource(name string) *v1alpha1.Sandbox {
	sb := &v1alpha1.Sandbox{}
	if err := m.api.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: name}, sb); err != nil {
		return nil
	}
	return sb
}

func (m *mesh) resources() int {
	list := &v1alpha1.SandboxList{}
	require.NoError(m.t, m.api.List(context.Background(), list))
	return len(list.Items)
}

func (m *mesh) eventually(what string, f func() bool) {
	m.t.Helper()
	require.Eventually(m.t, f, wait, tick, what)
}

// nothing waits until no trace of any sandbox is left: container, custom resource, reservation, view.
func (m *mesh) nothing() {
	m.t.Helper()
	m.eventually("nothing is left", func() bool {
		if m.resources() > 0 || m.store.Len() > 0 {
			return false
		}
		for _, a := range m.agents {
			if len(a.Sandboxes()) > 0 {
				return false
			}
		}
		for _, v := range m.registry.Agents(time.Now()) {
			if v.Allocated > 0 {
				return false
			}
		}
		return true
	})
}

func request(name string) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{Namespace: ns, Name: name, Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: pool}}
}

// waiting is a context that announces that a call has begun to wait for it.
type waiting struct {
	context.Context //nolint:containedctx // it is one
	once            sync.Once
	waits           chan struct{}
}

func newWaiting() *waiting {
	return &waiting{Context: context.Background(), waits: make(chan struct{})}
}

func (w *waiting) Done() <-chan struct{} {
	w.once.Do(func() { close(w.waits) })
	return w.Context.Done()
}
