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
	rbacv1 "k8s.io/api/rbac/v1"
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
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/app"
)

const systemNamespace = "fast-sandbox-system"

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

// asController returns a client configuration with the permissions of the manifests in deploy/base.
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

// testEnv is a namespace with a controller, a fake allocator and fake agents.
type testEnv struct {
	t         *testing.T
	ctx       context.Context //nolint:containedctx // a test's
	namespace string
	allocator *allocator
	config    app.Config
	stop      func()
	// clock, if set, is the controller's.
	clock clock.Clock
	// wrap, if set, wraps the controller's connection to the API server.
	wrap func(http.RoundTripper) http.RoundTripper
}

// newTestEnv returns a testEnv whose controller is not started.
func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	env := &testEnv{t: t, ctx: t.Context(), allocator: startAllocator(t), stop: func() {}}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "test-"}}
	require.NoError(t, kube.Create(env.ctx, ns))
	env.namespace = ns.Name
	env.permit()
	env.config = app.Config{
		AgentPort: 5758, ContainerdSocket: "/run/containerd/containerd.sock", ContainerdRoot: "/var/lib/containerd",
		LogRoot: "/var/log/fast-sandbox", SlotRoot: "/var/lib/fast-sandbox/slots", AgentCertificates: "controller", AgentCertLife: time.Hour, Namespace: systemNamespace,
		RequeueInterval: 200 * time.Millisecond, DeletionPoll: 100 * time.Millisecond, ExpirationCheck: 500 * time.Millisecond,
		LeaderElect: true, Lease: leader.DefaultTiming(), ShrinkDelay: 300 * time.Millisecond, MaxReconciles: 4, KubeQPS: 500, KubeBurst: 500,
	}
	env.config.TLS = rpc.TLS{Insecure: true}
	t.Cleanup(env.clean)
	return env
}

// permit binds the namespace to the controller, as an administrator does in each namespace with a pool.
func (env *testEnv) permit() {
	env.t.Helper()
	require.NoError(env.t, kube.Create(env.ctx, env.binding()))
}

func (env *testEnv) binding() *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: "fast-sandbox-controller"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "fast-sandbox-pool-namespace"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: systemNamespace, Name: "controller"}},
	}
}

// start starts a controller and waits until it leads. It is stopped by stop, or with the test.
func (env *testEnv) start() {
	env.t.Helper()
	p := env.startProcess(env.wrap)
	env.stop = func() { require.NoError(env.t, p.stop()) }
	env.t.Cleanup(func() { env.stop() })
	p.waitForLeadership()
}

// process is a controller.
type process struct {
	env     *testEnv
	manager manager.Manager
	// ended is closed when it has ended; err is the result.
	ended chan struct{}
	err   error
	// stop stops it, if it has not ended by itself, and returns its result.
	stop func() error
}

// startProcess starts a controller. It does not wait for leadership.
func (env *testEnv) startProcess(wrap func(http.RoundTripper) http.RoundTripper) *process {
	env.t.Helper()
	log := testr.NewWithInterface(env.t, testr.Options{Verbosity: 0})
	ctx, cancel := context.WithCancel(logr.NewContext(context.WithoutCancel(env.ctx), log))
	conn, err := rpc.Dial(env.allocator.address, rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(env.t, err)
	api := rest.CopyConfig(restConfig)
	api.Wrap(wrap)
	var opts []app.Option
	if env.clock != nil {
		opts = append(opts, app.WithClock(env.clock))
	}
	m, err := app.Manager(ctx, env.config, api, allocatorv1.NewAllocatorServiceClient(conn), prometheus.NewRegistry(), opts...)
	require.NoError(env.t, err)
	p := &process{env: env, manager: m, ended: make(chan struct{})}
	go func() { defer close(p.ended); p.err = m.Start(ctx) }()
	p.stop = sync.OnceValue(func() error {
		cancel()
		<-p.ended
		require.NoError(env.t, conn.Close())
		return p.err
	})
	env.t.Cleanup(func() { _ = p.stop() })
	return p
}

func (p *process) waitForLeadership() {
	p.env.t.Helper()
	select {
	case <-p.manager.Elected():
	case <-p.ended:
		require.FailNow(p.env.t, "the controller has ended", "%v", p.err)
	case <-time.After(testkit.Timeout):
		require.FailNow(p.env.t, "the controller does not lead")
	}
}

// clean deletes all resources of the namespace.
func (env *testEnv) clean() {
	env.stop()
	ctx := context.WithoutCancel(env.ctx)
	var sandboxes v1alpha1.SandboxList
	require.NoError(env.t, kube.List(ctx, &sandboxes, client.InNamespace(env.namespace)))
	for i := range sandboxes.Items {
		s := &sandboxes.Items[i]
		if len(s.Finalizers) > 0 {
			old := s.DeepCopy()
			s.Finalizers = nil
			require.NoError(env.t, client.IgnoreNotFound(kube.Patch(ctx, s, client.MergeFrom(old))))
		}
		require.NoError(env.t, client.IgnoreNotFound(kube.Delete(ctx, s)))
	}
	var pools v1alpha1.SandboxPoolList
	require.NoError(env.t, kube.List(ctx, &pools, client.InNamespace(env.namespace)))
	for i := range pools.Items {
		old := pools.Items[i].DeepCopy()
		pools.Items[i].Finalizers = nil
		require.NoError(env.t, client.IgnoreNotFound(kube.Patch(ctx, &pools.Items[i], client.MergeFrom(old))))
	}
	require.NoError(env.t, kube.DeleteAllOf(ctx, &v1alpha1.SandboxPool{}, client.InNamespace(env.namespace)))
	require.NoError(env.t, kube.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace(env.namespace), client.GracePeriodSeconds(0)))
}

// agentFor creates an agent Pod of the pool "pool" and starts its agent.
func (env *testEnv) agentFor(name string) *agent {
	env.t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: name,
			Labels: map[string]string{v1alpha1.LabelComponent: v1alpha1.ComponentAgent, v1alpha1.LabelPool: "pool"}},
		Spec: corev1.PodSpec{NodeName: "node-1", Containers: []corev1.Container{{Name: "agent", Image: "agent"}}},
	}
	require.NoError(env.t, kube.Create(env.ctx, pod))
	a := startAgent(env.t, &agentv1.AgentInfo{PodName: name, PodUid: string(pod.UID), Namespace: env.namespace, Pool: "pool", NodeName: "node-1", Capacity: 16}, env.allocator)
	env.allocator.add(a)
	return a
}

func (env *testEnv) sandbox(name string, change ...func(*v1alpha1.Sandbox)) *v1alpha1.Sandbox {
	env.t.Helper()
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: env.namespace, Name: name},
		Spec: v1alpha1.SandboxSpec{Image: "busybox", PoolRef: "pool", ExposedPorts: []int32{8080}}}
	for _, c := range change {
		c(s)
	}
	require.NoError(env.t, kube.Create(env.ctx, s))
	return s
}

func (env *testEnv) get(name string) *v1alpha1.Sandbox {
	env.t.Helper()
	var s v1alpha1.Sandbox
	require.NoError(env.t, kube.Get(env.ctx, client.ObjectKey{Namespace: env.namespace, Name: name}, &s))
	return &s
}

// waitFor waits for a state of a sandbox.
func (env *testEnv) waitFor(name, what string, condition func(*v1alpha1.Sandbox) bool) *v1alpha1.Sandbox {
	env.t.Helper()
	var s *v1alpha1.Sandbox
	env.eventually(func() bool { s = env.get(name); return condition(s) }, func() string {
		return fmt.Sprintf("sandbox %s is not %s: %+v\n%v", name, what, s.Status, s.Annotations)
	})
	return s
}

func (env *testEnv) waitForPhase(name string, phase v1alpha1.Phase) *v1alpha1.Sandbox {
	env.t.Helper()
	return env.waitFor(name, string(phase), func(s *v1alpha1.Sandbox) bool { return s.Status.Phase == phase })
}

func (env *testEnv) waitForRemoval(name string) {
	env.t.Helper()
	var s v1alpha1.Sandbox
	env.eventually(func() bool {
		err := kube.Get(env.ctx, client.ObjectKey{Namespace: env.namespace, Name: name}, &s)
		require.NoError(env.t, client.IgnoreNotFound(err))
		return err != nil
	}, func() string { return fmt.Sprintf("sandbox %s still exists: %+v", name, s) })
}

func (env *testEnv) eventually(condition func() bool, why func() string) {
	env.t.Helper()
	err := wait.PollUntilContextTimeout(env.ctx, testkit.Tick, testkit.Timeout, true, func(context.Context) (bool, error) { return condition(), nil })
	if err != nil {
		require.FailNow(env.t, "condition not met", why())
	}
}

// consistently checks that a condition holds for a while.
func (env *testEnv) consistently(d time.Duration, why string, condition func() bool) {
	env.t.Helper()
	err := wait.PollUntilContextTimeout(env.ctx, testkit.Tick, d, true, func(context.Context) (bool, error) { return !condition(), nil })
	require.True(env.t, wait.Interrupted(err), why)
}

func (env *testEnv) delete(name string) {
	env.t.Helper()
	require.NoError(env.t, kube.Delete(env.ctx, env.get(name)))
}
