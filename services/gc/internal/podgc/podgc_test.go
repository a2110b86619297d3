package podgc_test

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Unix(1_700_000_000, 0) //nolint:gochecknoglobals // a constant

// testEnv is a collector with its caches and a client that records writes.
type testEnv struct {
	t           *testing.T
	pods, nodes cache.Indexer
	client      *fake.Clientset
	clock       *clocktesting.FakeClock
	registry    *prometheus.Registry
	collector   *podgc.Collector

	mu     sync.Mutex
	writes []string
	bodies map[string]string
	refuse error
}

func newTestEnv(t *testing.T, threshold int) *testEnv {
	w := &testEnv{t: t, pods: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil), nodes: cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil),
		client: fake.NewClientset(), clock: clocktesting.NewFakeClock(start), registry: prometheus.NewRegistry(), bodies: map[string]string{}}
	note := func(verb string) k8stesting.ReactionFunc {
		return func(a k8stesting.Action) (bool, runtime.Object, error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			switch a := a.(type) {
			case k8stesting.PatchAction:
				w.writes = append(w.writes, verb+" "+a.GetName())
				w.bodies[a.GetName()] = string(a.GetPatch())
				require.Equal(t, "status", a.GetSubresource())
			case k8stesting.DeleteActionImpl:
				w.writes = append(w.writes, verb+" "+a.GetName())
				require.Equal(t, int64(0), *a.DeleteOptions.GracePeriodSeconds)
				require.Equal(t, types.UID("uid-"+a.GetName()), *a.DeleteOptions.Preconditions.UID)
			}
			return false, nil, nil
		}
	}
	w.client.PrependReactor("patch", "pods", note("patch"))
	w.client.PrependReactor("delete", "pods", note("delete"))
	c, err := podgc.New(podgc.Config{
		Client: w.client, Pods: corelisters.NewPodLister(w.pods), Nodes: corelisters.NewNodeLister(w.nodes), Threshold: threshold,
		Period: 20 * time.Second, Quarantine: 40 * time.Second, Parallel: 4, Clock: w.clock, Metrics: w.registry,
		Permit: func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.refuse
		},
	})
	require.NoError(t, err)
	w.collector = c
	return w
}

func (w *testEnv) pod(name string, change func(*corev1.Pod)) {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(start)},
		Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	change(p)
	require.NoError(w.t, w.client.Tracker().Add(p))
	require.NoError(w.t, w.pods.Add(p))
}

func (w *testEnv) node(name string, change func(*corev1.Node)) {
	w.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	change(n)
	require.NoError(w.t, w.nodes.Add(n))
}

func (w *testEnv) round() []string {
	w.collector.Round(w.t.Context())
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.writes
	w.writes = nil
	slices.Sort(out)
	return out
}

func bound(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }

func terminating(node string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.NodeName = node
		p.DeletionTimestamp = &metav1.Time{Time: start}
		p.Finalizers = []string{"example.com/kept"} // required by the fake client
	}
}

func TestFinishedPodsAreDeletedByThreshold(t *testing.T) {
	w := newTestEnv(t, 1)
	w.node("n", func(*corev1.Node) {})
	for i, name := range []string{"a", "b", "c"} {
		w.pod(name, func(p *corev1.Pod) {
			p.Spec.NodeName, p.Status.Phase = "n", corev1.PodSucceeded
			p.CreationTimestamp = metav1.NewTime(start.Add(time.Duration(i) * time.Second))
		})
	}
	require.Equal(t, []string{"delete a", "delete b"}, w.round())
	require.InDelta(t, 2, counter(t, w.registry, "fastsandbox_gc_deleting_pods_total", "terminated"), 0)
}

func counter(t *testing.T, r *prometheus.Registry, name, reason string) (sum float64) {
	t.Helper()
	families, err := r.Gather()
	require.NoError(t, err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetValue() == reason {
					sum += m.GetCounter().GetValue()
				}
			}
		}
	}
	return sum
}

func TestOrphanIsFailedBeforeItIsDeleted(t *testing.T) {
	w := newTestEnv(t, 0)
	w.pod("a", bound("gone"))
	require.Empty(t, w.round())
	w.clock.Step(20 * time.Second)
	require.Empty(t, w.round())
	w.clock.Step(20 * time.Second)
	require.Equal(t, []string{"delete a", "patch a"}, w.round())
	require.InDelta(t, 1, counter(t, w.registry, "fastsandbox_gc_deleting_pods_total", "orphaned"), 0)
	var body struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Status   corev1.PodStatus  `json:"status"`
	}
	require.NoError(t, json.Unmarshal([]byte(w.bodies["a"]), &body))
	require.Equal(t, types.UID("uid-a"), body.Metadata.UID)
	require.Equal(t, corev1.PodFailed, body.Status.Phase)
	require.Len(t, body.Status.Conditions, 1)
	require.Equal(t, corev1.DisruptionTarget, body.Status.Conditions[0].Type)
	require.Equal(t, "DeletionByPodGC", body.Status.Conditions[0].Reason)
}

func TestOnlyMissingNodesMakeOrphans(t *testing.T) {
	w := newTestEnv(t, 0)
	w.pod("a", bound("late"))
	w.pod("b", bound("unclear"))
	require.NoError(t, w.client.Tracker().Add(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "late"}}))
	asked := 0
	w.client.PrependReactor("get", "nodes", func(a k8stesting.Action) (bool, runtime.Object, error) {
		asked++
		if a.(k8stesting.GetAction).GetName() == "unclear" {
			return true, nil, apierrors.NewTimeoutError("no answer", 1)
		}
		return false, nil, nil
	})
	require.Empty(t, w.round())
	w.clock.Step(40 * time.Second)
	require.Empty(t, w.round())
	require.Equal(t, 2, asked)
	w.clock.Step(20 * time.Second)
	require.Empty(t, w.round())
	require.Equal(t, 3, asked, "only the node without an answer is asked for again")
}

func TestOutOfServiceAndUnscheduled(t *testing.T) {
	w := newTestEnv(t, 0)
	w.node("broken", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}}
	})
	w.node("tainted", func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeOutOfService}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	})
	w.pod("a", terminating("broken"))
	w.pod("b", terminating("tainted"))
	w.pod("c", terminating(""))
	w.pod("d", bound("broken"))
	require.Equal(t, []string{"delete a", "delete c", "patch a", "patch c"}, w.round())
	require.NotContains(t, w.bodies["a"], "conditions")
}

func TestFailedPatchPreventsDeletion(t *testing.T) {
	w := newTestEnv(t, 0)
	w.pod("a", terminating(""))
	w.pod("b", terminating(""))
	w.pod("gone", terminating(""))
	require.NoError(t, w.client.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "ns", "gone"))
	w.client.PrependReactor("patch", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
		return a.(k8stesting.PatchAction).GetName() == "a", nil, errors.New("refused")
	})
	require.Equal(t, []string{"delete b", "patch b", "patch gone"}, w.round())
	require.InDelta(t, 1, counter(t, w.registry, "fastsandbox_gc_deleting_pods_error_total", "unscheduled"), 0)
}

func TestNothingIsDeletedWithoutPermission(t *testing.T) {
	w := newTestEnv(t, 0)
	w.pod("a", terminating(""))
	w.refuse = errors.New("another leads")
	require.Empty(t, w.round())
	require.Zero(t, counter(t, w.registry, "fastsandbox_gc_deleting_pods_total", "unscheduled"))
}

func TestRunMakesOneRoundPerPeriod(t *testing.T) {
	w := newTestEnv(t, 0)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.collector.Run(ctx) }()
	rounds := func(n uint64) func() bool {
		return func() bool {
			families, err := w.registry.Gather()
			require.NoError(t, err)
			for _, f := range families {
				if f.GetName() == "fastsandbox_gc_pods_round_seconds" {
					return f.GetMetric()[0].GetHistogram().GetSampleCount() == n
				}
			}
			return false
		}
	}
	require.Eventually(t, rounds(1), 20*time.Second, time.Millisecond)
	require.Eventually(t, w.clock.HasWaiters, 20*time.Second, time.Millisecond)
	w.clock.Step(20 * time.Second)
	require.Eventually(t, rounds(2), 20*time.Second, time.Millisecond)
	cancel()
	require.NoError(t, <-done)
}

func TestNewNamesMissingFields(t *testing.T) {
	_, err := podgc.New(podgc.Config{})
	require.ErrorContains(t, err, "Permit")
	require.ErrorContains(t, err, "Parallel")
}

func TestStripKeepsOnlyWhatIsRead(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u", Annotations: map[string]string{"a": "b"}},
		Spec: corev1.PodSpec{NodeName: "n", Containers: []corev1.Container{{Name: "c"}}}, Status: corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted"}}
	out, err := podgc.Strip(pod)
	require.NoError(t, err)
	require.Equal(t, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"},
		Spec: corev1.PodSpec{NodeName: "n"}, Status: corev1.PodStatus{Phase: corev1.PodFailed, Reason: "Evicted"}}, out)
	out, err = podgc.Strip(&corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady}, {Type: corev1.NodeDiskPressure}}}})
	require.NoError(t, err)
	require.Len(t, out.(*corev1.Node).Status.Conditions, 1)
	out, err = podgc.Strip("else")
	require.NoError(t, err)
	require.Equal(t, "else", out)
}
