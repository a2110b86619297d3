//go:build integration

package app_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/pki"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/app"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func TestMain(m *testing.M) {
	crlog.SetLogger(logr.Discard())
	goleak.VerifyTestMain(m)
}

const (
	ns   = "default"
	pool = "default"
	wait = testkit.Timeout
	tick = testkit.Tick
	// verbosity of the allocator's log in the test's.
	verbosity = 0
)

// cluster is a real API server, reached through a proxy that can be cut, with one fake agent on loopback.
type cluster struct {
	t     *testing.T
	admin client.Client
	rest  *rest.Config // through the proxy
	proxy *proxy
	agent *fakeagent.Agent
	port  int
	// Issued once: issuing again writes into the same files, which an allocator that starts may be reading.
	own, client rpc.TLS
	issuer      *pki.Authority
	// allocators is how many were started.
	allocators int

	mu   sync.Mutex
	fake []*fakeagent.Agent
}

func newCluster(t *testing.T) *cluster {
	t.Helper()
	root, err := filepath.Abs("../../../..")
	require.NoError(t, err)
	assets := config.Env("KUBEBUILDER_ASSETS")
	if assets == "" {
		assets = filepath.Join(root, "bin", "k8s")
	}
	env := &envtest.Environment{
		CRDDirectoryPaths: []string{filepath.Join(root, "deploy", "crd")}, ErrorIfCRDPathMissing: true, BinaryAssetsDirectory: assets,
		// Agent Pods need no service account here.
		ControlPlane: envtest.ControlPlane{},
	}
	env.ControlPlane.GetAPIServer().Configure().Append("disable-admission-plugins", "ServiceAccount")
	cfg, err := env.Start()
	require.NoError(t, err, "starting etcd and kube-apiserver from %s", assets)
	t.Cleanup(func() { require.NoError(t, env.Stop()) })
	scheme := runtime.NewScheme()
	require.NoError(t, corev1.AddToScheme(scheme))
	require.NoError(t, v1alpha1.AddToScheme(scheme))
	require.NoError(t, coordinationv1.AddToScheme(scheme))
	require.NoError(t, eventsv1.AddToScheme(scheme))
	admin, err := client.New(cfg, client.Options{Scheme: scheme})
	require.NoError(t, err)
	c := &cluster{t: t, admin: admin, proxy: newProxy(t, cfg.Host), rest: rest.CopyConfig(cfg)}
	issuer := pki.New(t)
	c.own, c.client, c.issuer = issuer.TLS(t, rpc.RoleAllocator), issuer.User(t, "admin", "system:masters"), issuer
	c.rest.Host = "https://" + c.proxy.address
	c.createPool(pool)
	c.agent = c.startAgent("agent-1", pool, "127.0.0.1", 50)
	return c
}

// startAgent makes the Pod of an agent, which a pool owns, and the agent. All agents have one port, on addresses of their own.
func (c *cluster) startAgent(name, pool, ip string, capacity int32) *fakeagent.Agent {
	t := c.t
	t.Helper()
	owner := &v1alpha1.SandboxPool{}
	require.NoError(t, c.admin.Get(t.Context(), client.ObjectKey{Namespace: ns, Name: pool}, owner))
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: ns, Name: name, Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: pool},
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, v1alpha1.GroupVersion.WithKind("SandboxPool"))},
		},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	require.NoError(t, c.admin.Create(t.Context(), pod))
	pod.Status.Phase, pod.Status.PodIP, pod.Status.PodIPs = corev1.PodRunning, ip, []corev1.PodIP{{IP: ip}}
	require.NoError(t, c.admin.Status().Update(t.Context(), pod))
	agent := fakeagent.New(&agentv1.AgentInfo{
		PodName: pod.Name, PodUid: string(pod.UID), Namespace: ns, Pool: pool, NodeName: "node-1", PodIp: ip, Capacity: capacity,
	})
	listener, err := net.Listen("tcp", net.JoinHostPort(ip, fmt.Sprint(c.port)))
	require.NoError(t, err)
	c.port = listener.Addr().(*net.TCPAddr).Port
	files := c.issuer.Agent(t, rpc.AgentID{Namespace: ns, Pod: pod.Name, UID: string(pod.UID)})
	background(t, func(ctx context.Context) { _ = agent.Serve(ctx, listener, files) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fake = append(c.fake, agent)
	return agent
}

// all are the agents that were started.
func (c *cluster) all() []*fakeagent.Agent {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.fake)
}

func (c *cluster) createPool(name string) {
	require.NoError(c.t, c.admin.Create(c.t.Context(), &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec:       v1alpha1.SandboxPoolSpec{AgentTemplate: v1alpha1.AgentTemplate{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "agent", Image: "agent"}}}}},
	}))
}

// finalize stands for the controller: it lets a Sandbox go once no agent runs it.
func (c *cluster) finalize(ctx context.Context) {
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		list := &v1alpha1.SandboxList{}
		if c.admin.List(ctx, list) != nil {
			continue
		}
		running := map[string]bool{}
		for _, a := range c.all() {
			for _, r := range a.Sandboxes() {
				running[r.GetRecord().GetFence().GetSandboxUid()] = true
			}
		}
		for i := range list.Items {
			if sb := &list.Items[i]; sb.DeletionTimestamp != nil && !running[sb.EffectiveUID()] {
				sb.Finalizers = nil
				_ = c.admin.Update(ctx, sb) // a conflict is met again by the next round
			}
		}
	}
}

// background runs f until the test ends, and waits for it.
func background(t *testing.T, f func(context.Context)) context.CancelFunc {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { f(ctx) })
	stop := sync.OnceFunc(func() { cancel(); wg.Wait() })
	t.Cleanup(stop)
	return stop
}

type allocator struct {
	conn      *grpc.ClientConn
	sandboxes sandboxv1.SandboxServiceClient
	agents    allocatorv1.AllocatorServiceClient
	proxy     *proxy // to the API server, its own
	name      string
	stop      func()
	done      chan struct{} // closed when it has ended
}

func (a *allocator) ended() bool {
	select {
	case <-a.done:
		return true
	default:
		return false
	}
}

// start runs the real allocator and connects to it as a client.
func (c *cluster) start(options ...app.Option) *allocator {
	t := c.t
	t.Helper()
	c.allocators++
	out := &allocator{proxy: newProxy(t, c.rest.Host), name: fmt.Sprint("allocator-", c.allocators), done: make(chan struct{})}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	reach := rest.CopyConfig(c.rest)
	reach.Host = "https://" + out.proxy.address
	a, err := app.New(*c.config(out.name, listener.Addr().String()), append([]app.Option{app.WithREST(reach), app.WithListener(listener)}, options...)...)
	require.NoError(t, err)
	stop := background(t, func(ctx context.Context) {
		defer close(out.done)
		err := a.Run(logr.NewContext(ctx, testr.NewWithOptions(t, testr.Options{Verbosity: verbosity})))
		if err != nil && !errors.Is(err, leader.ErrLeadershipLost) {
			t.Error(err)
		}
	})
	conn, err := rpc.Dial(listener.Addr().String(), rpc.ClientConfig{TLS: c.client, ServerName: rpc.RoleAllocator.ServerName()})
	require.NoError(t, err)
	out.conn, out.sandboxes, out.agents = conn, sandboxv1.NewSandboxServiceClient(conn), allocatorv1.NewAllocatorServiceClient(conn)
	out.stop = sync.OnceFunc(func() { _ = conn.Close(); stop() })
	t.Cleanup(out.stop)
	return out
}

func (c *cluster) config(name, address string) *app.Config {
	cfg := app.NewConfig()
	cfg.TLS = c.own
	cfg.MetricsAddress, cfg.HealthSocket, cfg.BindAddress = "0", "0", "unused"
	cfg.AgentPort, cfg.ConsistencyMode, cfg.OrphanTimeout, cfg.CreateTimeout, cfg.WriteQueueLimit = c.port, "fast", time.Second, 10*time.Second, 1000
	cfg.HeartbeatTimeout = registry.DefaultHeartbeatTimeout
	cfg.Access = auth.Options{Stale: auth.DefaultTiming().Stale, KeyNamespace: auth.DefaultKeyNamespace}
	cfg.LeaderElect, cfg.Namespace, cfg.PodName, cfg.AdvertiseAddress = true, ns, name, address
	cfg.Lease = leader.Timing{LeaseDuration: 2 * time.Second, RenewDeadline: 1500 * time.Millisecond, RetryPeriod: 200 * time.Millisecond}
	return cfg
}

// authorized has the API server decide what the client may do, for what follows while it is away.
func (a *allocator) authorized(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	_, err := a.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	nowhere := create("nowhere")
	nowhere.Spec.Pool = "nowhere"
	_, err = a.sandboxes.CreateSandbox(ctx, nowhere)
	require.Equal(t, fault.PoolNotFound, fault.ReasonOf(rpc.FromStatus(err)), "%v", err)
	_, err = a.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "nowhere"})
	requireUnknown(t, err)
	logs, err := a.sandboxes.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: ns, Name: "nowhere"})
	require.NoError(t, err)
	_, err = logs.Recv()
	requireUnknown(t, err)
}

// requireUnknown requires the answer about a sandbox that does not exist: it was authorized. An agent of an earlier test, whose Pod the
// API server still has, may have the sandbox as far as the allocator knows.
func requireUnknown(t *testing.T, err error) {
	t.Helper()
	if fault.ReasonOf(rpc.FromStatus(err)) != fault.AgentUnavailable {
		require.Equal(t, codes.NotFound, status.Code(err), "%v", err)
	}
}

func (a *allocator) awaitAgent(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool {
		list, err := a.agents.ListAgents(context.Background(), &allocatorv1.ListAgentsRequest{})
		return err == nil && len(list.GetAgents()) == 1 && list.GetAgents()[0].GetReady()
	}, wait, tick)
}

func create(name string) *sandboxv1.CreateSandboxRequest {
	return &sandboxv1.CreateSandboxRequest{Namespace: ns, Name: name, Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: pool, Env: map[string]string{"A": "b"}}}
}

func (c *cluster) count() int {
	list := &v1alpha1.SandboxList{}
	require.NoError(c.t, c.admin.List(context.Background(), list))
	return len(list.Items)
}

func TestAllocatorAgainstAnAPIServer(t *testing.T) {
	c := newCluster(t)
	background(t, c.finalize)
	a := c.start()
	a.awaitAgent(t)
	ctx := t.Context()

	t.Run("roles", func(t *testing.T) {
		_, err := a.agents.Allocate(ctx, &allocatorv1.AllocateRequest{Namespace: ns, Name: "x", SandboxUid: "x", Attempt: 1, Pool: pool, Image: "busybox"})
		require.Equal(t, codes.PermissionDenied, status.Code(err))
		p, err := a.agents.GetPool(ctx, &allocatorv1.GetPoolRequest{Namespace: ns, Name: pool})
		require.NoError(t, err)
		require.EqualValues(t, 50, p.GetPool().GetCapacity())
	})
	t.Run("the resource is written and the agent is notified", func(t *testing.T) {
		resp, err := a.sandboxes.CreateSandbox(ctx, create("lands"))
		require.NoError(t, err)
		sb := &v1alpha1.Sandbox{}
		require.Eventually(t, func() bool { return c.admin.Get(ctx, client.ObjectKey{Namespace: ns, Name: "lands"}, sb) == nil }, wait, tick)
		require.Equal(t, resp.GetSandbox().GetUid(), sb.EffectiveUID())
		require.Eventually(t, func() bool { return len(c.agent.Sandboxes()) == 1 && c.agent.Sandboxes()[0].GetPersisted() }, wait, tick)
		_, err = a.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "lands"})
		require.NoError(t, err)
		require.Eventually(t, func() bool { return c.count() == 0 }, wait, tick)
	})
	t.Run("40 creates, each followed by its delete, leave nothing", func(t *testing.T) { storm(t, c, a) })
	t.Run("an outage of the API server is survived", func(t *testing.T) { outage(t, c, a) })
	t.Run("a restart while the API server is away loses nothing", func(t *testing.T) { restart(t, c, a) })
}

func storm(t *testing.T, c *cluster, a *allocator) {
	names := make(chan string, 40)
	for i := range 40 {
		names <- fmt.Sprint("storm-", i)
	}
	close(names)
	var wg sync.WaitGroup
	var failed atomic.Int64
	for range 8 {
		wg.Go(func() {
			for name := range names {
				_, createErr := a.sandboxes.CreateSandbox(context.Background(), create(name))
				_, deleteErr := a.sandboxes.DeleteSandbox(context.Background(), &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: name})
				if createErr != nil || deleteErr != nil {
					t.Log(name, createErr, deleteErr)
					failed.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, failed.Load())
	require.Eventually(t, func() bool { return c.count() == 0 && len(c.agent.Sandboxes()) == 0 }, wait, tick)
	// No call of the allocator's reports that its last write has ended: the window is longer than one takes.
	require.Never(t, func() bool { return c.count() > 0 }, 500*time.Millisecond, tick, "no write of a deleted sandbox lands")
}

func outage(t *testing.T, c *cluster, a *allocator) {
	ctx := t.Context()
	a.authorized(t)
	c.proxy.cut()
	for i := range 5 {
		_, err := a.sandboxes.CreateSandbox(ctx, create(fmt.Sprint("away-", i)))
		require.NoError(t, err)
	}
	list, err := a.sandboxes.ListSandboxes(ctx, &sandboxv1.ListSandboxesRequest{Namespace: ns})
	require.NoError(t, err)
	require.Len(t, list.GetSandboxes(), 5)
	logs, err := a.sandboxes.StreamLogs(ctx, &sandboxv1.StreamLogsRequest{Namespace: ns, Name: "away-1"})
	require.NoError(t, err)
	_, err = logs.Recv()
	require.NoError(t, err)
	_, err = a.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: "away-0"})
	require.NoError(t, err)
	require.Zero(t, c.count())
	c.proxy.mend()
	require.Eventually(t, func() bool { return c.count() == 4 }, wait, tick)
	for i := range 4 {
		_, err := a.sandboxes.DeleteSandbox(ctx, &sandboxv1.DeleteSandboxRequest{Namespace: ns, Name: fmt.Sprint("away-", i+1)})
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool { return c.count() == 0 && len(c.agent.Sandboxes()) == 0 }, wait, tick)
}

func restart(t *testing.T, c *cluster, a *allocator) {
	a.authorized(t)
	c.proxy.cut()
	resp, err := a.sandboxes.CreateSandbox(t.Context(), create("kept"))
	require.NoError(t, err)
	a.stop()
	began := time.Now()
	b := c.start()
	health := healthv1.NewHealthClient(b.conn)
	state := func() healthv1.HealthCheckResponse_ServingStatus {
		r, err := health.Check(context.Background(), &healthv1.HealthCheckRequest{})
		if err != nil {
			return healthv1.HealthCheckResponse_UNKNOWN
		}
		return r.GetStatus()
	}
	require.Eventually(t, func() bool { return state() == healthv1.HealthCheckResponse_NOT_SERVING }, wait, tick, "it serves without an API server, and is not ready")
	t.Log("answers after", time.Since(began))
	require.Zero(t, c.count())
	c.proxy.mend()
	require.Eventually(t, func() bool { return state() == healthv1.HealthCheckResponse_SERVING }, wait, tick)
	sb := &v1alpha1.Sandbox{}
	require.Eventually(t, func() bool {
		return c.admin.Get(context.Background(), client.ObjectKey{Namespace: ns, Name: "kept"}, sb) == nil
	}, wait, tick, "it is adopted")
	require.Equal(t, resp.GetSandbox().GetUid(), sb.EffectiveUID())
	b.stop()
	began = time.Now()
	b = c.start()
	health = healthv1.NewHealthClient(b.conn)
	require.Eventually(t, func() bool { return state() == healthv1.HealthCheckResponse_SERVING }, wait, tick)
	t.Log("ready after", time.Since(began))
	b.awaitAgent(t)
	t.Log("registry rebuilt after", time.Since(began))
}

// proxy passes connections on to the API server until it is cut.
type proxy struct {
	address, target string

	mu    sync.Mutex
	isCut bool
	conns map[net.Conn]struct{}
	wg    sync.WaitGroup
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	target = strings.Trim(strings.TrimPrefix(target, "https:"), "/")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &proxy{address: l.Addr().String(), target: target, conns: map[net.Conn]struct{}{}}
	p.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			p.wg.Go(func() { p.serve(conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.wg.Wait()
	})
	return p
}

func (p *proxy) serve(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer out.Close()
	p.mu.Lock()
	if p.isCut {
		p.mu.Unlock()
		return
	}
	p.conns[in], p.conns[out] = struct{}{}, struct{}{}
	p.mu.Unlock()
	var wg sync.WaitGroup
	for _, pair := range [][2]net.Conn{{in, out}, {out, in}} {
		wg.Go(func() {
			_, _ = io.Copy(pair[0], pair[1])
			_ = pair[0].Close()
			_ = pair[1].Close()
		})
	}
	wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, in)
	delete(p.conns, out)
}

func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = true
	for c := range p.conns {
		_ = c.Close()
	}
}

func (p *proxy) mend() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.isCut = false
}
