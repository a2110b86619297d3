//go:build integration

package app_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/testr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/yaml"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/leader"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/app"
)

const (
	systemNamespace = "fast-sandbox-system"
	patience        = 20 * time.Second
	tick            = 20 * time.Millisecond
)

var (
	restConfig *rest.Config  //nolint:gochecknoglobals // one API server for all tests of the package
	adminConf  *rest.Config  //nolint:gochecknoglobals // likewise
	kube       client.Client //nolint:gochecknoglobals // likewise
)

// TestMain starts a real API server and etcd from bin/k8s, which `make` builds.
func TestMain(m *testing.M) {
	crlog.SetLogger(logr.Discard())
	env := &envtest.Environment{
		CRDDirectoryPaths: []string{filepath.Join("..", "..", "..", "..", "deploy", "crd", "fast-sandbox.io_sandboxes.yaml"),
			filepath.Join("..", "..", "..", "..", "deploy", "crd", "fast-sandbox.io_sandboxpools.yaml")},
		ErrorIfCRDPathMissing: true,
		BinaryAssetsDirectory: filepath.Join("..", "..", "..", "..", "bin", "k8s"),
	}
	if dir := config.Env("KUBEBUILDER_ASSETS"); dir != "" {
		env.BinaryAssetsDirectory = dir
	}
	code := func() int {
		cfg, err := env.Start()
		if err != nil {
			fmt.Fprintf(os.Stderr, "starting the API server (make builds it into bin/k8s): %v\n", err)
			return 1
		}
		defer func() {
			if err := env.Stop(); err != nil {
				fmt.Fprintf(os.Stderr, "stopping the API server: %v\n", err)
			}
		}()
		scheme := runtime.NewScheme()
		_ = clientgoscheme.AddToScheme(scheme)
		_ = v1alpha1.AddToScheme(scheme)
		cfg.QPS, cfg.Burst = 1000, 1000
		adminConf = cfg
		if kube, err = client.New(cfg, client.Options{Scheme: scheme}); err == nil {
			restConfig, err = asController(env)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return m.Run()
	}()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// asController is a way to the API server with the rights of the manifests in deploy/base, and no others.
func asController(env *envtest.Environment) (*rest.Config, error) {
	ctx := context.Background()
	if err := kube.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: systemNamespace}}); err != nil {
		return nil, err
	}
	raw, err := os.ReadFile(filepath.Join("..", "..", "..", "..", "deploy", "base", "controller-rbac.yaml"))
	if err != nil {
		return nil, err
	}
	for _, document := range strings.Split(string(raw), "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			return nil, err
		}
		u := &unstructured.Unstructured{Object: o}
		if strings.HasPrefix(u.GetKind(), "Role") || u.GetKind() == "ServiceAccount" {
			u.SetNamespace(systemNamespace)
		}
		if err := kube.Create(ctx, u); err != nil {
			return nil, err
		}
	}
	user, err := env.AddUser(envtest.User{Name: "system:serviceaccount:" + systemNamespace + ":controller", Groups: []string{"system:authenticated"}}, nil)
	if err != nil {
		return nil, err
	}
	return user.Config(), nil
}

// world is a namespace with a controller, a fake allocator and fake agents around it.
type world struct {
	t         *testing.T
	ctx       context.Context //nolint:containedctx // a test's
	namespace string
	allocator *allocator
	config    app.Config
	stop      func()
	// clock, if set, is the controller's.
	clock clock.Clock
	// wrap, if set, stands between the controller and the API server.
	wrap func(http.RoundTripper) http.RoundTripper
}

// newWorld makes a world whose controller is not started yet.
func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, ctx: t.Context(), allocator: startAllocator(t), stop: func() {}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	require.NoError(t, kube.Create(w.ctx, ns))
	w.namespace = ns.Name
	w.config = app.Config{
		AgentPort: 5758, ContainerdSocket: "/run/containerd/containerd.sock", ContainerdRoot: "/var/lib/containerd",
		LogRoot: "/var/log/fast-sandbox", SlotRoot: "/var/lib/fast-sandbox/slots", AgentTLSSecret: "agent-tls", Namespace: systemNamespace,
		RequeueInterval: 200 * time.Millisecond, DeletionPoll: 100 * time.Millisecond, ExpirationCheck: 500 * time.Millisecond,
		LeaderElect: true, Lease: leader.DefaultTiming(), HeartbeatTimeout: time.Second, ShrinkDelay: 300 * time.Millisecond, MaxReconciles: 4, KubeQPS: 500, KubeBurst: 500,
	}
	w.config.TLS = rpc.TLS{Insecure: true}
	t.Cleanup(w.clean)
	return w
}

// start starts a controller that leads, and stops it with the test or by stop.
func (w *world) start() {
	w.t.Helper()
	p := w.launch(w.wrap)
	w.stop = func() { require.NoError(w.t, p.stop()) }
	w.t.Cleanup(func() { w.stop() })
	p.leads()
}

// process is one controller.
type process struct {
	w       *world
	manager manager.Manager
	// ended is closed when it has, and then err is why.
	ended chan struct{}
	err   error
	// stop ends it, if it has not ended by itself, and returns why it did.
	stop func() error
}

// launch starts a controller, whether it gets to lead or not.
func (w *world) launch(wrap func(http.RoundTripper) http.RoundTripper) *process {
	w.t.Helper()
	log := testr.NewWithInterface(w.t, testr.Options{Verbosity: 0})
	ctx, cancel := context.WithCancel(logr.NewContext(context.WithoutCancel(w.ctx), log))
	conn, err := rpc.Dial(w.allocator.address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(w.t, err)
	api := rest.CopyConfig(restConfig)
	api.Wrap(wrap)
	var opts []app.Option
	if w.clock != nil {
		opts = append(opts, app.WithClock(w.clock))
	}
	m, err := app.Manager(ctx, w.config, api, allocatorv1.NewAllocatorServiceClient(conn), prometheus.NewRegistry(), opts...)
	require.NoError(w.t, err)
	p := &process{w: w, manager: m, ended: make(chan struct{})}
	go func() { defer close(p.ended); p.err = m.Start(ctx) }()
	p.stop = sync.OnceValue(func() error {
		cancel()
		<-p.ended
		require.NoError(w.t, conn.Close())
		return p.err
	})
	w.t.Cleanup(func() { _ = p.stop() })
	return p
}

func (p *process) leads() {
	p.w.t.Helper()
	select {
	case <-p.manager.Elected():
	case <-p.ended:
		require.FailNow(p.w.t, "the controller has ended", "%v", p.err)
	case <-time.After(patience):
		require.FailNow(p.w.t, "the controller does not lead")
	}
}

// clean takes everything out of the world, so that the next test's controller does not meet it.
func (w *world) clean() {
	w.stop()
	ctx := context.WithoutCancel(w.ctx)
	var sandboxes v1alpha1.SandboxList
	require.NoError(w.t, kube.List(ctx, &sandboxes, client.InNamespace(w.namespace)))
	for i := range sandboxes.Items {
		s := &sandboxes.Items[i]
		if len(s.Finalizers) > 0 {
			old := s.DeepCopy()
			s.Finalizers = nil
			require.NoError(w.t, client.IgnoreNotFound(kube.Patch(ctx, s, client.MergeFrom(old))))
		}
		require.NoError(w.t, client.IgnoreNotFound(kube.Delete(ctx, s)))
	}
	var pools v1alpha1.SandboxPoolList
	require.NoError(w.t, kube.List(ctx, &pools, client.InNamespace(w.namespace)))
	for i := range pools.Items {
		old := pools.Items[i].DeepCopy()
		pools.Items[i].Finalizers = nil
		require.NoError(w.t, client.IgnoreNotFound(kube.Patch(ctx, &pools.Items[i], client.MergeFrom(old))))
	}
	require.NoError(w.t, kube.DeleteAllOf(ctx, &v1alpha1.SandboxPool{}, client.InNamespace(w.namespace)))
	require.NoError(w.t, kube.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(w.namespace), client.GracePeriodSeconds(0)))
}

// agentFor makes an agent Pod of the pool "pool" and the agent in it.
func (w *world) agentFor(name string) *agent {
	w.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name,
			Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: "pool"}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	require.NoError(w.t, kube.Create(w.ctx, pod))
	a := startAgent(w.t, &agentv1.AgentInfo{PodName: name, PodUid: string(pod.UID), Namespace: w.namespace, Pool: "pool", NodeName: "node-1", Capacity: 16}, w.allocator)
	w.allocator.add(a)
	return a
}

func (w *world) sandbox(name string, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	w.t.Helper()
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "pool", ExposedPorts: []int32{8080}}}
	for _, c := range change {
		c(s)
	}
	require.NoError(w.t, kube.Create(w.ctx, s))
	return s
}

func (w *world) get(name string) *v1alpha1.Sandbox {
	w.t.Helper()
	var s v1alpha1.Sandbox
	require.NoError(w.t, kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &s))
	return &s
}

// reaches waits until the sandbox is as told.
func (w *world) reaches(name, what string, is func(*v1alpha1.Sandbox) bool) *v1alpha1.Sandbox {
	w.t.Helper()
	var s *v1alpha1.Sandbox
	w.eventually(func() bool { s = w.get(name); return is(s) }, func() string {
		return fmt.Sprintf("sandbox %s never got %s: %+v\n%v", name, what, s.Status, s.Annotations)
	})
	return s
}

func (w *world) reachesPhase(name string, phase v1alpha1.Phase) *v1alpha1.Sandbox {
	w.t.Helper()
	return w.reaches(name, string(phase), func(s *v1alpha1.Sandbox) bool { return s.Status.Phase == phase })
}

func (w *world) vanishes(name string) {
	w.t.Helper()
	var s v1alpha1.Sandbox
	w.eventually(func() bool {
		err := kube.Get(w.ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, &s)
		require.NoError(w.t, client.IgnoreNotFound(err))
		return err != nil
	}, func() string { return fmt.Sprintf("sandbox %s is still there: %+v", name, s) })
}

func (w *world) eventually(is func() bool, why func() string) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(w.ctx, tick, patience, true, func(context.Context) (bool, error) { return is(), nil })
	if err != nil {
		require.FailNow(w.t, "never happened", why())
	}
}

// stays watches for a while that something goes on being so.
func (w *world) stays(d time.Duration, why string, is func() bool) {
	w.t.Helper()
	err := wait.PollUntilContextTimeout(w.ctx, tick, d, true, func(context.Context) (bool, error) { return !is(), nil })
	require.True(w.t, wait.Interrupted(err), why)
}

func (w *world) delete(name string) {
	w.t.Helper()
	require.NoError(w.t, kube.Delete(w.ctx, w.get(name)))
}
