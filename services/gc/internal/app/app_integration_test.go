//go:build integration

package app_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
	crlog "sigs.k8s.io/controller-runtime/pkg/log"

	gcv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/gc/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/app"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/conflict"
)

var (
	api  *rest.Config         //nolint:gochecknoglobals // one API server for all tests of the package
	kube kubernetes.Interface //nolint:gochecknoglobals // likewise
)

// TestMain starts a real API server and etcd from bin/k8s, which `make` builds.
func TestMain(m *testing.M) {
	crlog.SetLogger(logr.Discard())
	env := &envtest.Environment{BinaryAssetsDirectory: filepath.Join("..", "..", "..", "..", "bin", "k8s")}
	if dir := config.Env("KUBEBUILDER_ASSETS"); dir != "" {
		env.BinaryAssetsDirectory = dir
	}
	code := func() int {
		cfg, err := env.Start()
		defer func() {
			if err := env.Stop(); err != nil {
				fmt.Fprintf(os.Stderr, "stopping the API server: %v\n", err)
			}
		}()
		if err == nil {
			cfg.QPS = -1
			api = cfg
			kube, err = kubernetes.NewForConfig(cfg)
		}
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

func namespace(t *testing.T) string {
	t.Helper()
	ns, err := kube.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "gc-"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return ns.Name
}

// run runs the collectors with quick settings and those of args. ended has their error; stop ends them.
func run(t *testing.T, namespace string, args ...string) (a *app.App, ended <-chan error, stop func()) {
	t.Helper()
	cfg := parsed(t, append([]string{"--namespace=" + namespace, "--metrics-bind-address=0", "--bind-address=127.0.0.1:0", "--health-socket=0", "--mode=enforce",
		"--rival-check=300ms", "--pod-gc-period=200ms", "--pod-gc-quarantine=600ms", "--initial-sync-timeout=5s", "--lease-duration=1s",
		"--lease-renew-deadline=800ms", "--lease-retry-period=50ms"}, args...)...)
	require.NoError(t, cfg.Validate())
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	a, err = app.New(ctx, *cfg, api)
	require.NoError(t, err)
	result, done := make(chan error, 1), make(chan struct{})
	go func() {
		defer close(done)
		result <- a.Run(ctx)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return a, result, stop
}

// ask connects to the collectors.
func ask(t *testing.T, a *app.App) gcv1.GarbageCollectorServiceClient {
	t.Helper()
	conn, err := rpc.Dial("passthrough:///"+a.Addr().String(), rpc.ClientConfig{TLS: rpc.TLS{Insecure: true}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, conn.Close()) })
	return gcv1.NewGarbageCollectorServiceClient(conn)
}

func configMap(t *testing.T, namespace, name string, owners ...metav1.OwnerReference) *corev1.ConfigMap {
	t.Helper()
	c, err := kube.CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, OwnerReferences: owners}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return c
}

func owned(by *corev1.ConfigMap) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: by.Name, UID: by.UID}
}

// absentOwner returns a reference to an owner that does not exist.
func absentOwner() metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "v1", Kind: "ConfigMap", Name: "absent", UID: "absent-uid"}
}

func there(t *testing.T, namespace, name string) bool {
	t.Helper()
	_, err := kube.CoreV1().ConfigMaps(namespace).Get(t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false
	}
	require.NoError(t, err)
	return true
}

func gone(t *testing.T, namespace, name string) {
	t.Helper()
	require.Eventually(t, func() bool { return !there(t, namespace, name) }, testkit.Timeout, testkit.Tick, "%s is still there", name)
}

// decided waits until a collector has observed a ConfigMap and decided about it: its state is as wanted. After that, a collector that
// acts on it would have done so, or has it in its queue.
func decided(t *testing.T, client gcv1.GarbageCollectorServiceClient, namespace, name string, want gcv1.State) {
	t.Helper()
	which := &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{Kind: &gcv1.Kind{Kind: "ConfigMap"}, Namespace: namespace, Name: name}}}
	require.Eventually(t, func() bool {
		x, err := client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: which})
		return err == nil && x.GetState() == want
	}, testkit.Timeout, testkit.Tick, "%s is not %s", name, want)
}

func pod(t *testing.T, namespace, name, node string, phase corev1.PodPhase) *corev1.Pod {
	t.Helper()
	pods := kube.CoreV1().Pods(namespace)
	p, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{"example.com/look"}}, Spec: corev1.PodSpec{
		NodeName: node, AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{Name: "c", Image: "i"}}}}, metav1.CreateOptions{})
	require.NoError(t, err)
	p.Status.Phase = phase
	p, err = pods.UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
	require.NoError(t, err)
	return p
}

// ended waits until a Pod is being deleted at once, and returns how it ended.
func ended(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	var out *corev1.Pod
	require.Eventually(t, func() bool {
		var err error
		out, err = kube.CoreV1().Pods(p.Namespace).Get(t.Context(), p.Name, metav1.GetOptions{})
		require.NoError(t, err)
		return out.DeletionTimestamp != nil && ptr.Deref(out.DeletionGracePeriodSeconds, -1) == 0
	}, testkit.Timeout, testkit.Tick, "%s is not deleted", p.Name)
	return out
}

func TestPodGC(t *testing.T) {
	ns := namespace(t)
	_, err := kube.CoreV1().ServiceAccounts(ns).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	require.NoError(t, err)
	node := func(name string, taints ...corev1.Taint) {
		_, err := kube.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.NodeSpec{Taints: taints}}, metav1.CreateOptions{})
		require.NoError(t, err)
		t.Cleanup(func() { _ = kube.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
	}
	node("here")
	node("broken", corev1.Taint{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute})
	runs := pod(t, ns, "runs", "here", corev1.PodRunning)
	lost := pod(t, ns, "lost", "nowhere", corev1.PodRunning)
	stuck := pod(t, ns, "stuck", "broken", corev1.PodRunning)
	unbound := pod(t, ns, "unbound", "", corev1.PodPending)
	first := pod(t, ns, "a-first", "here", corev1.PodSucceeded)
	pod(t, ns, "b-second", "here", corev1.PodSucceeded)
	require.NoError(t, kube.CoreV1().Pods(ns).Delete(t.Context(), "stuck", metav1.DeleteOptions{}))
	require.NoError(t, kube.CoreV1().Pods(ns).Delete(t.Context(), "unbound", metav1.DeleteOptions{}))
	run(t, ns, "--terminated-pod-gc-threshold=1")
	lost = ended(t, lost)
	require.Equal(t, corev1.PodFailed, lost.Status.Phase)
	require.Len(t, lost.Status.Conditions, 1)
	require.Equal(t, "DeletionByPodGC", lost.Status.Conditions[0].Reason)
	require.Equal(t, corev1.PodFailed, ended(t, stuck).Status.Phase)
	require.Equal(t, corev1.PodFailed, ended(t, unbound).Status.Phase)
	require.Equal(t, corev1.PodSucceeded, ended(t, first).Status.Phase)
	now, err := kube.CoreV1().Pods(ns).Get(t.Context(), runs.Name, metav1.GetOptions{})
	require.NoError(t, err)
	require.Nil(t, now.DeletionTimestamp)
}

func TestOneReplicaCollects(t *testing.T) {
	ns := namespace(t)
	_, _, stopFirst := run(t, ns)
	configMap(t, ns, "a", absentOwner())
	gone(t, ns, "a")
	_, _, stopSecond := run(t, ns)
	configMap(t, ns, "b", absentOwner())
	gone(t, ns, "b")
	stopFirst()
	root := configMap(t, ns, "root")
	configMap(t, ns, "c", owned(root))
	require.NoError(t, kube.CoreV1().ConfigMaps(ns).Delete(t.Context(), "root", metav1.DeleteOptions{}))
	gone(t, ns, "c")
	stopSecond()
	configMap(t, ns, "d", absentOwner())
	third, _, stopThird := run(t, ns, "--mode=observe")
	decided(t, ask(t, third), ns, "d", gcv1.State_STATE_DOOMED)
	stopThird() // returns when its workers have ended
	require.True(t, there(t, ns, "d"), "it only observes")
}

// TestAnotherCollectorAtTheStart: the first, which does not know of the second's Lease, deletes the canary of the second.
func TestAnotherCollectorAtTheStart(t *testing.T) {
	_, _, stop := run(t, namespace(t), "--rival-check-period=0")
	ns := namespace(t)
	configMap(t, ns, "a", absentOwner())
	gone(t, ns, "a") // the first is active
	_, ended, _ := run(t, ns, "--rival-check=10s")
	endsWithConflict(t, ended)
	stop()
	requireNoCanary(t, ns)
}

// TestAnotherCollectorStartsLater: the first repeats its check, finds its own canary unharmed as long as it is alone, and ends
// when a second collector deletes the canary.
func TestAnotherCollectorStartsLater(t *testing.T) {
	ns := namespace(t)
	a, ended, _ := run(t, ns, "--rival-check=1s", "--rival-check-period=1s")
	canaries := map[string]bool{}
	require.Eventually(t, func() bool {
		list, err := kube.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{})
		require.NoError(t, err)
		for _, c := range list.Items {
			if strings.HasPrefix(c.Name, "fast-sandbox-gc-canary-") {
				canaries[c.Name] = true
			}
		}
		return len(canaries) >= 3
	}, testkit.Timeout, testkit.Tick, "the check is not repeated")
	status, err := ask(t, a).GetStatus(t.Context(), &gcv1.GetStatusRequest{})
	require.NoError(t, err)
	require.True(t, status.GetEnforcing(), "a collector that is alone continues")
	run(t, namespace(t), "--rival-check=0")
	endsWithConflict(t, ended)
}

func endsWithConflict(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		require.ErrorIs(t, err, conflict.ErrFound)
	case <-time.After(testkit.Timeout):
		require.Fail(t, "the collector did not end")
	}
}

func requireNoCanary(t *testing.T, ns string) {
	t.Helper()
	list, err := kube.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Empty(t, list.Items)
}

func TestTooManyDeletionsStopTheCollector(t *testing.T) {
	ns := namespace(t)
	root := configMap(t, ns, "root")
	for i := range 50 {
		configMap(t, ns, fmt.Sprint("d", i), owned(root))
	}
	require.NoError(t, kube.CoreV1().ConfigMaps(ns).Delete(t.Context(), "root", metav1.DeleteOptions{}))
	a, _, stop := run(t, ns, "--max-delete-floor=10", "--max-delete-share=0.01")
	client := ask(t, a)
	require.Eventually(t, func() bool {
		status, err := client.GetStatus(t.Context(), &gcv1.GetStatusRequest{})
		return err == nil && strings.Contains(status.GetStopped(), "all deletions are stopped") && !status.GetEnforcing()
	}, testkit.Timeout, testkit.Tick)
	configMap(t, ns, "later", absentOwner())
	decided(t, client, ns, "later", gcv1.State_STATE_DOOMED)
	stop() // returns when its workers have ended
	list, err := kube.CoreV1().ConfigMaps(ns).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	require.Len(t, list.Items, 51, "no object is deleted, not even up to the limit")
}

// TestExplainAndWatch while the collector works.
func TestExplainAndWatch(t *testing.T) {
	ns := namespace(t)
	a, _, stop := run(t, ns)
	client := ask(t, a)
	watch, err := client.WatchDeletions(t.Context(), &gcv1.WatchDeletionsRequest{Namespace: ns})
	require.NoError(t, err)
	_, err = watch.Header()
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		status, err := client.GetStatus(t.Context(), &gcv1.GetStatusRequest{})
		return err == nil && status.GetEnforcing()
	}, testkit.Timeout, testkit.Tick)
	root := configMap(t, ns, "root")
	d := configMap(t, ns, "d", owned(root))
	which := &gcv1.Selector{By: &gcv1.Selector_Place{Place: &gcv1.Place{Kind: &gcv1.Kind{Kind: "ConfigMap"}, Namespace: ns, Name: "d"}}}
	var x *gcv1.ExplainObjectResponse
	require.Eventually(t, func() bool {
		x, err = client.ExplainObject(t.Context(), &gcv1.ExplainObjectRequest{Object: which})
		return err == nil && x.GetState() == gcv1.State_STATE_OWNED
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, string(root.UID), x.GetPath()[0].GetUid())
	preview, err := client.PreviewDelete(t.Context(), &gcv1.PreviewDeleteRequest{Object: &gcv1.Selector{By: &gcv1.Selector_Uid{Uid: string(root.UID)}}})
	require.NoError(t, err)
	for _, want := range []string{"root", "d"} {
		part, err := preview.Recv()
		require.NoError(t, err)
		require.Equal(t, want, part.GetConsequence().GetObject().GetPlace().GetName())
	}
	require.NoError(t, kube.CoreV1().ConfigMaps(ns).Delete(t.Context(), "root", metav1.DeleteOptions{}))
	deletion, err := watch.Recv()
	require.NoError(t, err)
	require.Equal(t, string(d.UID), deletion.GetObject().GetUid())
	require.Equal(t, gcv1.Cause_CAUSE_OWNERS_GONE, deletion.GetCause())
	stop()
	_, err = watch.Recv()
	require.Equal(t, codes.Unavailable, status.Code(err), "its end ends the watch")
}

func TestImpossibleReferenceIsReported(t *testing.T) {
	ns, elsewhere := namespace(t), namespace(t)
	stranger := configMap(t, elsewhere, "owner")
	configMap(t, ns, "d", owned(stranger))
	_, err := kube.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{
		Name: ns, OwnerReferences: []metav1.OwnerReference{owned(stranger)}}}, metav1.CreateOptions{})
	require.NoError(t, err)
	reported := func(where, name string) func() bool {
		return func() bool {
			list, err := kube.CoreV1().Events(where).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=OwnerRefInvalidNamespace,involvedObject.name=" + name})
			return err == nil && len(list.Items) == 1 && list.Items[0].Type == corev1.EventTypeWarning && strings.Contains(list.Items[0].Message, string(stranger.UID))
		}
	}
	observer, _, stop := run(t, ns, "--mode=observe")
	decided(t, ask(t, observer), ns, "d", gcv1.State_STATE_DOOMED)
	stop()
	require.False(t, reported(ns, "d")(), "a collector that observes writes no Events")
	run(t, ns)
	require.Eventually(t, reported(ns, "d"), testkit.Timeout, testkit.Tick)
	require.Eventually(t, reported("default", ns), testkit.Timeout, testkit.Tick)
	gone(t, ns, "d")
}
