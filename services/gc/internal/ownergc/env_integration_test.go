//go:build integration

package ownergc_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

const (
	holds = "example.com/hold"
)

// server is the API server for all tests of this package.
type server struct {
	env  *envtest.Environment
	rest *rest.Config
	kube client.Client
}

var theServer server //nolint:gochecknoglobals // one API server for all tests of the package

// TestMain starts a real API server and etcd from bin/k8s, which `make` builds.
func TestMain(m *testing.M) {
	crlog.SetLogger(logr.Discard())
	code := func() int {
		err := theServer.start()
		defer func() {
			if err := theServer.env.Stop(); err != nil {
				fmt.Fprintf(os.Stderr, "stopping the API server: %v\n", err)
			}
		}()
		if err != nil {
			fmt.Fprintf(os.Stderr, "starting the API server (make builds it into bin/k8s): %v\n", err)
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

func (s *server) start() error {
	up := filepath.Join("..", "..", "..", "..")
	s.env = &envtest.Environment{
		CRDDirectoryPaths:     []string{filepath.Join(up, "deploy", "crd", "fast-sandbox.io_sandboxes.yaml"), filepath.Join(up, "deploy", "crd", "fast-sandbox.io_sandboxpools.yaml")},
		ErrorIfCRDPathMissing: true, BinaryAssetsDirectory: filepath.Join(up, "bin", "k8s"),
	}
	if dir := config.Env("KUBEBUILDER_ASSETS"); dir != "" {
		s.env.BinaryAssetsDirectory = dir
	}
	var err error
	if s.rest, err = s.env.Start(); err != nil {
		return err
	}
	s.rest.QPS = -1
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, v1alpha1.AddToScheme} {
		if err := add(scheme); err != nil {
			return err
		}
	}
	s.kube, err = client.New(s.rest, client.Options{Scheme: scheme})
	return err
}

// testEnv is one namespace and a collector.
type testEnv struct {
	*server

	t         *testing.T
	namespace string
	recorder  *events.FakeRecorder
	collector *ownergc.Collector
	stop      func()

	// wrap, if not nil, is put between the collector and the API server.
	wrap func(metadata.Interface) metadata.Interface

	mu     sync.Mutex
	refuse error
	scope  func(string) bool
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	w := &testEnv{server: &theServer, t: t, scope: func(string) bool { return true }}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "gc-"}}
	require.NoError(t, w.kube.Create(t.Context(), ns))
	w.namespace = ns.Name
	t.Cleanup(func() {
		if w.stop != nil {
			w.stop()
		}
	})
	return w
}

// start starts a collector with the given credentials, and waits until it has listed everything.
func (w *testEnv) start(api *rest.Config) {
	w.t.Helper()
	var meta metadata.Interface
	meta, err := metadata.NewForConfig(api)
	require.NoError(w.t, err)
	if w.wrap != nil {
		meta = w.wrap(meta)
	}
	disco, err := discovery.NewDiscoveryClientForConfig(api)
	require.NoError(w.t, err)
	w.recorder = events.NewFakeRecorder(1000)
	w.collector, err = ownergc.New(ownergc.Config{
		Metadata: meta, Discovery: disco, Recorder: w.recorder, Workers: 8, SyncPeriod: 300 * time.Millisecond, InitialSyncTimeout: 2 * time.Second,
		Ignored: []schema.GroupResource{{Resource: "events"}, {Group: "events.k8s.io", Resource: "events"}},
		InScope: w.scope, Clock: clock.RealClock{}, Metrics: prometheus.NewRegistry(),
		Permit: func(*breaker.Intent) error {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.refuse
		},
	})
	require.NoError(w.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.collector.Run(ctx) }()
	w.stop = func() {
		cancel()
		require.NoError(w.t, <-ended)
		w.stop = nil
	}
}

// owner returns a reference to an object.
func owner(o client.Object, block bool) metav1.OwnerReference {
	gvk, err := theServer.kube.GroupVersionKindFor(o)
	if err != nil {
		panic(err) // a type that is missing in the scheme
	}
	return metav1.OwnerReference{APIVersion: gvk.GroupVersion().String(), Kind: gvk.Kind, Name: o.GetName(), UID: o.GetUID(), BlockOwnerDeletion: &block}
}

// config creates a ConfigMap.
func (w *testEnv) config(name string, owners ...metav1.OwnerReference) *corev1.ConfigMap {
	w.t.Helper()
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name, OwnerReferences: owners}}
	require.NoError(w.t, w.kube.Create(w.t.Context(), c))
	return c
}

func (w *testEnv) delete(o client.Object, policy metav1.DeletionPropagation) {
	w.t.Helper()
	require.NoError(w.t, w.kube.Delete(w.t.Context(), o, client.PropagationPolicy(policy)))
}

// is reads an object and reports whether it exists.
func (w *testEnv) is(o client.Object) bool {
	w.t.Helper()
	err := w.kube.Get(w.t.Context(), client.ObjectKeyFromObject(o), o)
	require.NoError(w.t, client.IgnoreNotFound(err))
	return !apierrors.IsNotFound(err)
}

func (w *testEnv) gone(objects ...client.Object) {
	w.t.Helper()
	for _, o := range objects {
		require.Eventually(w.t, func() bool { return !w.is(o) }, testkit.Timeout, testkit.Tick, "%s is still there: %+v", o.GetName(), o)
	}
}

// settled waits until the collector has observed the present version of an object and has nothing to do with it.
func (w *testEnv) settled(objects ...client.Object) {
	w.t.Helper()
	for _, o := range objects {
		require.True(w.t, w.is(o), o.GetName())
		require.Eventually(w.t, func() bool {
			var x graph.Explanation
			var ok bool
			w.collector.Query(func(g *graph.Graph) { x, ok = g.Explain(string(o.GetUID()), 1) })
			unverified := slices.ContainsFunc(x.Owners, func(v graph.OwnerView) bool { return v.Status == graph.Unverified })
			return ok && x.Object.ResourceVersion == o.GetResourceVersion() && x.Next.Verb == graph.Keep && !unverified
		}, testkit.Timeout, testkit.Tick, "%s is not settled", o.GetName())
	}
}

func (w *testEnv) owners(o client.Object) []string {
	w.t.Helper()
	require.True(w.t, w.is(o))
	out := []string{}
	for _, r := range o.GetOwnerReferences() {
		out = append(out, r.Name)
	}
	return out
}

func (w *testEnv) permit(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refuse = err
}

// event waits for a Warning.
func (w *testEnv) event() string {
	w.t.Helper()
	select {
	case e := <-w.recorder.Events:
		return e
	case <-time.After(testkit.Timeout):
		require.Fail(w.t, "no Event")
		return ""
	}
}
