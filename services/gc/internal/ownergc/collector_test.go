package ownergc_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/metadata/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/breaker"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

var (
	podKind      = graph.Kind{Kind: "Pod"}
	pods         = schema.GroupResource{Resource: "pods"}
	podsVersion1 = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
)

// rig is a collector at a fake API server that serves Pods, and everything that the collector wrote.
type rig struct {
	client    *fake.FakeMetadataClient
	registry  *prometheus.Registry
	recorder  *events.FakeRecorder
	config    ownergc.Config
	collector *ownergc.Collector
	watching  <-chan struct{} // closed by watched, when Pods are watched
	watched   func()

	mu      sync.Mutex
	refuse  error
	intents []*breaker.Intent
	deleted []ownergc.Deletion
	deletes []k8stesting.DeleteActionImpl
	patches []k8stesting.PatchActionImpl
}

func newRig(t *testing.T, objects ...runtime.Object) *rig {
	t.Helper()
	scheme := fake.NewTestScheme()
	require.NoError(t, metav1.AddMetaToScheme(scheme))
	watching := make(chan struct{})
	r := &rig{watching: watching, watched: sync.OnceFunc(func() { close(watching) }), client: fake.NewSimpleMetadataClient(scheme, objects...), registry: prometheus.NewRegistry(), recorder: events.NewFakeRecorder(100)}
	// The fake has no streaming lists, and says so as an older API server does.
	r.client.PrependWatchReactor("*", func(a k8stesting.Action) (bool, watch.Interface, error) {
		if o := a.(k8stesting.WatchActionImpl).ListOptions.SendInitialEvents; o != nil && *o {
			return true, nil, apierrors.NewInvalid(schema.GroupKind{}, "sendInitialEvents", nil)
		}
		w, err := r.client.Tracker().Watch(a.GetResource(), a.GetNamespace())
		if a.GetResource().Resource == "pods" {
			r.watched()
		}
		return true, w, err
	})
	r.client.PrependReactor("delete", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.deletes = append(r.deletes, a.(k8stesting.DeleteActionImpl))
		return false, nil, nil
	})
	r.client.PrependReactor("patch", "*", func(a k8stesting.Action) (bool, runtime.Object, error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.patches = append(r.patches, a.(k8stesting.PatchActionImpl))
		return false, nil, nil
	})
	r.config = ownergc.Config{
		Metadata: r.client, Recorder: r.recorder, Workers: 2, SyncPeriod: time.Hour, InitialSyncTimeout: testkit.Timeout, Clock: clock.RealClock{}, Metrics: r.registry,
		Discovery: shown{groups: []*metav1.APIGroup{group("", "v1")}, lists: []*metav1.APIResourceList{list("v1", api("pods", "Pod", true, all...))}},
		Permit: func(i *breaker.Intent) error {
			<-r.watching // the fake would not tell a later watch of this write
			r.mu.Lock()
			defer r.mu.Unlock()
			r.intents = append(r.intents, i)
			return r.refuse
		},
		Deleted: func(d ownergc.Deletion) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.deleted = append(r.deleted, d)
		},
	}
	return r
}

// start runs the collector until the end of the test, and waits until it has listed everything.
func (r *rig) start(t *testing.T) {
	t.Helper()
	var err error
	r.collector, err = ownergc.New(r.config)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.collector.Run(ctx) }()
	t.Cleanup(func() { cancel(); require.NoError(t, <-done) })
	select {
	case <-r.collector.Synced():
	case <-time.After(testkit.Timeout):
		require.Fail(t, "the collector did not list everything")
	}
}

// idle waits until the collector has nothing to do with an object.
func (r *rig) idle(t *testing.T, uid string) {
	t.Helper()
	require.Eventually(t, func() bool {
		var x graph.Explanation
		r.collector.Query(func(g *graph.Graph) { x, _ = g.Explain(uid, 1) })
		unverified := slices.ContainsFunc(x.Owners, func(v graph.OwnerView) bool { return v.Status == graph.Unverified })
		return !unverified && r.metric("fastsandbox_workqueue_depth", "attempt_to_delete") == 0 && r.processed() > 0
	}, testkit.Timeout, testkit.Tick)
}

func (r *rig) processed() float64 {
	return r.metric("fastsandbox_workqueue_work_duration_seconds", "attempt_to_delete")
}

// metric returns a gauge, a counter, or the number of observations of a histogram.
func (r *rig) metric(name, queue string) float64 {
	families, err := r.registry.Gather()
	if err != nil {
		return -1
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			labels := m.GetLabel()
			if f.GetName() != name || queue != "" && (len(labels) != 1 || labels[0].GetValue() != queue) {
				continue
			}
			switch f.GetType().String() {
			case "HISTOGRAM":
				return float64(m.GetHistogram().GetSampleCount())
			case "COUNTER":
				return m.GetCounter().GetValue()
			default:
				return m.GetGauge().GetValue()
			}
		}
	}
	return -1
}

func (r *rig) writes() (deletes []k8stesting.DeleteActionImpl, patches []k8stesting.PatchActionImpl) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.deletes), slices.Clone(r.patches)
}

func pod(name string, owners ...string) *metav1.PartialObjectMetadata {
	m := &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), ResourceVersion: "7"}}
	for _, owner := range owners {
		m.OwnerReferences = append(m.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: owner, UID: types.UID("uid-" + owner)})
	}
	return m
}

func TestDeletesObjectWhoseOwnerIsAbsent(t *testing.T) {
	r := newRig(t, pod("garbage", "absent"), pod("root"), pod("kept", "root"))
	r.start(t)
	require.Eventually(t, func() bool { deletes, _ := r.writes(); return len(deletes) > 0 }, testkit.Timeout, testkit.Tick)
	deletes, patches := r.writes()
	require.Len(t, deletes, 1)
	require.Empty(t, patches)
	require.Equal(t, "garbage", deletes[0].Name)
	options := deletes[0].DeleteOptions
	require.Equal(t, metav1.DeletePropagationBackground, *options.PropagationPolicy)
	require.Equal(t, types.UID("uid-garbage"), *options.Preconditions.UID, "bound to the object that was decided about")
	require.Equal(t, "7", *options.Preconditions.ResourceVersion, "bound to the version that was decided about")
	require.Eventually(t, func() bool { return r.collector.Size().Objects == 2 }, testkit.Timeout, testkit.Tick, "the watch reports the deletion")
	r.mu.Lock()
	defer r.mu.Unlock()
	require.Len(t, r.deleted, 1)
	require.Equal(t, graph.OwnersGone, r.deleted[0].Cause)
	require.Equal(t, "uid-garbage", r.deleted[0].Object.UID)
	require.Len(t, r.intents, 1, "every write is permitted first")
	require.Equal(t, 3, r.intents[0].Objects)
}

func TestQueueMetrics(t *testing.T) {
	r := newRig(t, pod("garbage", "absent"))
	failing := true
	r.client.PrependReactor("get", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		if failing {
			failing = false
			return true, nil, apierrors.NewTimeoutError("no answer", 1)
		}
		return false, nil, nil
	})
	r.start(t)
	require.Eventually(t, func() bool { deletes, _ := r.writes(); return len(deletes) == 1 && r.processed() >= 3 }, testkit.Timeout, testkit.Tick)
	// The lookup of the owner failed once: it was added, added again after a delay, and led to the deletion of the dependent.
	require.GreaterOrEqual(t, r.metric("fastsandbox_workqueue_adds_total", "attempt_to_delete"), 3.0)
	require.Equal(t, 1.0, r.metric("fastsandbox_workqueue_retries_total", "attempt_to_delete"))
	require.GreaterOrEqual(t, r.metric("fastsandbox_workqueue_queue_duration_seconds", "attempt_to_delete"), 3.0)
	require.Equal(t, 0.0, r.metric("fastsandbox_workqueue_depth", "attempt_to_delete"))
	for _, name := range []string{"depth", "unfinished_work_seconds", "longest_running_processor_seconds", "adds_total", "retries_total",
		"queue_duration_seconds", "work_duration_seconds"} {
		require.Equal(t, 0.0, r.metric("fastsandbox_workqueue_"+name, "attempt_to_orphan"), name)
	}
	require.Equal(t, 1.0, r.metric("fastsandbox_gc_errors_total", ""))
}

func TestRefusedWriteIsNotMade(t *testing.T) {
	r := newRig(t, pod("garbage", "absent"))
	r.refuse = errors.New("not the leader")
	r.start(t)
	r.idle(t, "uid-garbage")
	deletes, _ := r.writes()
	require.Empty(t, deletes)
	r.mu.Lock()
	r.refuse = nil
	r.mu.Unlock()
	r.collector.Resume(t.Context())
	require.Eventually(t, func() bool { deletes, _ := r.writes(); return len(deletes) == 1 }, testkit.Timeout, testkit.Tick)
}

func TestSparedAndOutOfScopeObjectsAreNotWritten(t *testing.T) {
	for name, change := range map[string]func(*ownergc.Config){
		"spared":       func(c *ownergc.Config) { c.Spares = func(o graph.Object) bool { return o.Name == "garbage" } },
		"out of scope": func(c *ownergc.Config) { c.InScope = func(group string) bool { return group != "" } },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pod("garbage", "absent"))
			change(&r.config)
			r.start(t)
			r.idle(t, "uid-garbage")
			deletes, patches := r.writes()
			require.Empty(t, deletes)
			require.Empty(t, patches)
			r.mu.Lock()
			defer r.mu.Unlock()
			require.Empty(t, r.intents, "it does not count as a deletion")
		})
	}
}

// TestConflictIsDecidedAgain: the object got a second owner that exists while the deletion was on its way.
func TestConflictIsDecidedAgain(t *testing.T) {
	r := newRig(t, pod("root"), pod("d", "absent"))
	changed := pod("d", "absent", "root")
	changed.ResourceVersion = "8"
	conflicts := 0
	r.client.PrependReactor("delete", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		conflicts++
		return true, nil, apierrors.NewConflict(pods, "d", errors.New("it was modified"))
	})
	r.client.PrependReactor("get", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
		return a.(k8stesting.GetAction).GetName() == "d", changed, nil
	})
	r.start(t)
	require.Eventually(t, func() bool { _, patches := r.writes(); return len(patches) > 0 }, testkit.Timeout, testkit.Tick)
	_, patches := r.writes()
	require.JSONEq(t, `{"metadata":{"uid":"uid-d","resourceVersion":"8","ownerReferences":[{"apiVersion":"v1","kind":"Pod","name":"root","uid":"uid-root"}]}}`,
		string(patches[0].Patch), "only the dangling reference is removed")
	require.Equal(t, 1, conflicts)
	require.Equal(t, 1.0, r.metric("fastsandbox_gc_conflicts_total", ""))
}

func TestUnlistableResourceIsReportedAndBlocksNothing(t *testing.T) {
	r := newRig(t, pod("garbage", "absent"))
	r.config.InitialSyncTimeout = 20 * time.Millisecond
	r.config.Discovery = shown{groups: []*metav1.APIGroup{group("", "v1")}, lists: []*metav1.APIResourceList{
		list("v1", api("pods", "Pod", true, all...), api("secrets", "Secret", true, all...))}}
	r.client.PrependReactor("list", "secrets", func(k8stesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "secrets"}, "", errors.New("not allowed"))
	})
	r.start(t)
	require.Eventually(t, func() bool { deletes, _ := r.writes(); return len(deletes) == 1 }, testkit.Timeout, testkit.Tick)
	require.Eventually(t, func() bool { return len(r.collector.Failing()) == 1 }, testkit.Timeout, testkit.Tick)
	require.Contains(t, r.collector.Failing()["secrets"], "not allowed")
	require.Equal(t, 1.0, r.metric("fastsandbox_gc_failing_resources", ""))
}

func TestUnknownKindOfOwnerKeepsTheObject(t *testing.T) {
	d := pod("d")
	d.OwnerReferences = []metav1.OwnerReference{{APIVersion: "example.com/v1", Kind: "Unknown", Name: "u", UID: "u"}}
	r := newRig(t, d)
	r.start(t)
	r.idle(t, "uid-d")
	var x graph.Explanation
	r.collector.Query(func(g *graph.Graph) { x, _ = g.Explain("uid-d", 1) })
	require.Equal(t, graph.Unclear, x.State)
	require.Equal(t, graph.Unresolvable, x.Owners[0].Status)
	deletes, _ := r.writes()
	require.Empty(t, deletes)
}

// TestMissingInAListIsVerified: after a watch that broke, a list lacks an object. Only the API server's answer removes it.
func TestMissingInAListIsVerified(t *testing.T) {
	r := newRig(t, pod("owner"), pod("d", "owner"))
	broken := make(chan watch.Interface, 10)
	r.client.PrependWatchReactor("pods", func(a k8stesting.Action) (bool, watch.Interface, error) {
		if o := a.(k8stesting.WatchActionImpl).ListOptions.SendInitialEvents; o != nil && *o {
			return false, nil, nil
		}
		w := watch.NewFake()
		r.watched()
		broken <- w
		return true, w, nil
	})
	r.start(t)
	w := <-broken
	require.NoError(t, r.client.Tracker().Delete(podsVersion1, "ns", "owner"))
	w.(*watch.FakeWatcher).Error(&apierrors.NewResourceExpired("too old").ErrStatus)
	w.Stop()
	require.Eventually(t, func() bool { deletes, _ := r.writes(); return len(deletes) == 1 }, testkit.Timeout, testkit.Tick, "the dependent is deleted")
	deletes, _ := r.writes()
	require.Equal(t, "d", deletes[0].Name)
	r.collector.Query(func(g *graph.Graph) {
		_, ok := g.Find(podKind, "ns", "owner")
		require.False(t, ok)
	})
}

func TestNewNamesMissingFields(t *testing.T) {
	_, err := ownergc.New(ownergc.Config{})
	for _, field := range []string{"Metadata", "Discovery", "Recorder", "Workers", "SyncPeriod", "Permit", "Clock", "Metrics"} {
		require.ErrorContains(t, err, field+" is required")
	}
	r := newRig(t)
	r.start(t)
	_, err = ownergc.New(r.config)
	require.ErrorContains(t, err, "registering metrics", "two collectors with one registry")
}
