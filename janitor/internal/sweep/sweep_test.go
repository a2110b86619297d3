package sweep_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/events"

	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/sweep"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
)

// node is a scripted Judge and Remover, which records what it did.
type node struct {
	mu       sync.Mutex
	findings map[observe.Key]observe.Finding
	fail     map[string][]error // by step, one for each attempt
	steps    []string
	reported []string
	at, most int // concurrent removals, and their maximum
	hold     chan struct{}
}

func (n *node) do(step string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.steps = append(n.steps, step)
	if list := n.fail[step]; len(list) > 0 {
		n.fail[step] = list[1:]
		return list[0]
	}
	return nil
}

func (n *node) done() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.steps)
}

func (n *node) Confirm(_ context.Context, key observe.Key) (observe.Finding, error) {
	if err := n.do("confirm " + key.ID); err != nil {
		return observe.Finding{}, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	f, ok := n.findings[key]
	if !ok {
		return f, fmt.Errorf("%s: %w", key.ID, errdefs.ErrNotFound)
	}
	return f, nil
}

func (n *node) Gone(key observe.Key) {
	_ = n.do("gone " + key.ID)
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.findings, key)
}

func (n *node) Remove(ctx context.Context, id string) error {
	n.mu.Lock()
	n.at++
	n.most = max(n.most, n.at)
	hold := n.hold
	n.mu.Unlock()
	defer func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.at--
	}()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return n.do("remove " + id)
}

func (n *node) RemovePiece(_ context.Context, p ctrd.Piece) error {
	return n.do("remove " + string(p.Part) + " of " + p.ID)
}
func (n *node) Measure(context.Context, string) int64 { return 100 }
func (n *node) MarkDeleted(id string) error           { return n.do("mark " + id) }

func orphan(id string) observe.Finding {
	return observe.Finding{
		Key: observe.Key{ID: id}, Verdict: verdict.Verdict{Action: verdict.Delete, Reason: verdict.SandboxAbsent}, Orphan: time.Unix(1, 0), Traceparent: traceparent,
		Observation: &verdict.Observation{ContainerID: id, Managed: true, Identity: identity.Identity{
			Namespace: "ns", Name: "one", SandboxUID: "u", Attempt: 1, AgentUID: "a", State: identity.StateClaimed, Persisted: true,
		}},
	}
}

type fixture struct {
	*sweep.Sweeper

	node     *node
	registry *prometheus.Registry

	mu   sync.Mutex
	said []string
}

// logged reports whether a log record has all of the words.
func (f *fixture) logged(words ...string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.ContainsFunc(f.said, func(line string) bool {
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) })
	})
}

func newFixture(t *testing.T, retention time.Duration, findings ...observe.Finding) *fixture {
	t.Helper()
	f := &fixture{node: &node{findings: map[observe.Key]observe.Finding{}, fail: map[string][]error{}}, registry: prometheus.NewRegistry()}
	for _, found := range findings {
		f.node.findings[found.Key] = found
	}
	metrics, err := sweep.NewMetrics(f.registry)
	require.NoError(t, err)
	f.Sweeper = sweep.New(sweep.Config{
		Judge: f.node, Remover: f.node, Policy: verdict.Policy{LogRetention: retention}, Workers: 2, Metrics: metrics,
		Log: funcr.New(func(_, args string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.said = append(f.said, args)
		}, funcr.Options{}),
		Report: func(found observe.Finding) {
			f.node.mu.Lock()
			defer f.node.mu.Unlock()
			f.node.reported = append(f.node.reported, found.Key.ID)
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return f
}

// metric returns a counter's value for the given label values, in the order of the label names.
func (f *fixture) metric(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	families, err := f.registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if family.GetName() == name && slices.Equal(values, labels) {
				return m.GetCounter().GetValue()
			}
		}
	}
	return 0
}

func (f *fixture) eventually(t *testing.T, steps ...string) {
	t.Helper()
	require.Eventually(t, func() bool { return slices.Equal(f.node.done(), steps) }, testkit.Timeout, testkit.Tick, "%v", steps)
}

func TestOrphanIsConfirmedAndRemoved(t *testing.T) {
	f := newFixture(t, 0, orphan("a"))
	f.Add(observe.Key{ID: "a"})
	f.eventually(t, "confirm a", "remove a", "gone a")
	require.Eventually(t, func() bool {
		f.node.mu.Lock()
		defer f.node.mu.Unlock()
		return slices.Equal(f.node.reported, []string{"a"})
	}, testkit.Timeout, testkit.Tick)
	require.InDelta(t, 1, f.metric(t, "fastsandbox_janitor_deletions_total", "claimed", "sandbox-absent"), 0)
	require.InDelta(t, 100, f.metric(t, "fastsandbox_janitor_freed_bytes_total"), 0)
}

func TestOnlyOrphansAreRemoved(t *testing.T) {
	kept := orphan("a")
	kept.Verdict = verdict.Verdict{Action: verdict.Wait, Reason: verdict.WithinGrace}
	f := newFixture(t, 0, kept)
	r := f.Sweep(t.Context(), observe.Key{ID: "a"}, nil, false)
	require.Equal(t, sweep.Kept, r.Outcome)
	require.Equal(t, verdict.WithinGrace, r.Finding.Verdict.Reason)
	require.Equal(t, sweep.Gone, f.Sweep(t.Context(), observe.Key{ID: "b"}, nil, false).Outcome)
	f.Add(observe.Key{ID: "a"})
	f.eventually(t, "confirm a", "confirm b", "confirm a")
}

func TestFailuresAreRetried(t *testing.T) {
	f := newFixture(t, 0, orphan("a"))
	away := errors.New("connection refused")
	f.node.fail = map[string][]error{"confirm a": {away}, "remove a": {errors.New("busy")}}
	f.Add(observe.Key{ID: "a"})
	f.eventually(t, "confirm a", "confirm a", "remove a", "confirm a", "remove a", "gone a")
	f.node.mu.Lock()
	f.node.findings[observe.Key{ID: "a"}] = orphan("a")
	f.node.fail = map[string][]error{"confirm a": {away}}
	f.node.mu.Unlock()
	r := f.Sweep(t.Context(), observe.Key{ID: "a"}, nil, false)
	require.Equal(t, sweep.Failed, r.Outcome)
	require.ErrorIs(t, r.Err, away)
	require.Equal(t, "a", r.Finding.Key.ID)
}

func TestDryRunAndSelectionRemoveNothing(t *testing.T) {
	f := newFixture(t, 0, orphan("a"))
	key := observe.Key{ID: "a"}
	r := f.Sweep(t.Context(), key, nil, true)
	require.Equal(t, sweep.WouldDelete, r.Outcome)
	require.EqualValues(t, 100, r.FreedBytes)
	r = f.Sweep(t.Context(), key, func(v verdict.Verdict) bool { return v.Reason == verdict.AgentPodGone }, false)
	require.Equal(t, sweep.Kept, r.Outcome)
	require.Equal(t, []string{"confirm a", "confirm a"}, f.node.done())
	r = f.Sweep(t.Context(), key, func(v verdict.Verdict) bool { return v.Reason == verdict.SandboxAbsent }, false)
	require.Equal(t, sweep.Deleted, r.Outcome)
}

func TestRetainedLogIsMarkedFirst(t *testing.T) {
	f := newFixture(t, time.Hour, orphan("a"))
	require.Equal(t, sweep.Deleted, f.Sweep(t.Context(), observe.Key{ID: "a"}, nil, false).Outcome)
	require.Equal(t, []string{"confirm a", "mark a", "remove a", "gone a"}, f.node.done())

	f = newFixture(t, time.Hour, orphan("a"))
	f.node.fail["mark a"] = []error{errors.New("no space left on device")}
	require.Equal(t, sweep.Deleted, f.Sweep(t.Context(), observe.Key{ID: "a"}, nil, false).Outcome, "a full disk does not prevent the removal")
	require.True(t, f.logged("marking the log of an orphan", "no space left on device"))
	require.InDelta(t, 1, f.metric(t, "fastsandbox_janitor_unmarked_logs_total"), 0)
}

// TestReadOnlyContainerd removes nothing; each failure is logged and counted, and retried until it succeeds.
func TestReadOnlyContainerd(t *testing.T) {
	f := newFixture(t, 0, orphan("a"), orphan("b"))
	refused := errors.New("removing snapshot: read-only file system")
	f.node.mu.Lock()
	f.node.fail = map[string][]error{"remove a": {refused, refused}}
	f.node.mu.Unlock()
	f.Add(observe.Key{ID: "a"})
	f.Add(observe.Key{ID: "b"})
	require.Eventually(t, func() bool {
		return slices.Contains(f.node.done(), "gone a") && slices.Contains(f.node.done(), "gone b")
	}, testkit.Timeout, testkit.Tick)
	require.Less(t, slices.Index(f.node.done(), "gone b"), slices.Index(f.node.done(), "gone a"), "a failing removal does not block others")
	require.True(t, f.logged("orphan not removed yet", `"container"="a"`, "read-only file system"))
	require.InDelta(t, 2, f.metric(t, "fastsandbox_janitor_deletion_failures_total", "sandbox-absent"), 0)
	require.InDelta(t, 0, f.metric(t, "fastsandbox_janitor_unconfirmed_total"), 0)
}

// TestUnavailableAPIServer is logged and counted too, but not as a failed removal.
func TestUnavailableAPIServer(t *testing.T) {
	f := newFixture(t, 0, orphan("a"))
	f.node.mu.Lock()
	f.node.fail = map[string][]error{"confirm a": {errors.New("connection refused")}}
	f.node.mu.Unlock()
	f.Add(observe.Key{ID: "a"})
	f.eventually(t, "confirm a", "confirm a", "remove a", "gone a")
	require.True(t, f.logged("orphan not removed yet", "confirming that a is an orphan", "connection refused"))
	require.InDelta(t, 1, f.metric(t, "fastsandbox_janitor_unconfirmed_total"), 0)
	require.InDelta(t, 0, f.metric(t, "fastsandbox_janitor_deletion_failures_total", "sandbox-absent"), 0)
}

func TestRemnantIsRemovedPieceByPiece(t *testing.T) {
	key := observe.Key{ID: "a", Remnant: true, Kind: verdict.Log}
	f := newFixture(t, 0, observe.Finding{
		Key: key, Verdict: verdict.Verdict{Action: verdict.Delete, Reason: verdict.Leftover}, Remnant: &verdict.Remnant{ContainerID: "a"},
		Pieces: []ctrd.Piece{{ID: "a", Part: ctrd.PartLog}, {ID: "a", Part: ctrd.PartMount}},
	})
	f.node.fail["remove log of a"] = []error{errors.New("read-only")}
	r := f.Sweep(t.Context(), key, nil, false)
	require.Equal(t, sweep.Failed, r.Outcome)
	require.ErrorContains(t, r.Err, "read-only")
	require.Equal(t, []string{"confirm a", "remove log of a", "remove mount of a"}, f.node.done(), "a failing piece does not block others")
	require.Equal(t, sweep.Deleted, f.Sweep(t.Context(), key, nil, false).Outcome)
}

func TestConcurrentRemovalsAreBounded(t *testing.T) {
	var list []observe.Finding
	for i := range 10 {
		list = append(list, orphan(fmt.Sprint(i)))
	}
	f := newFixture(t, 0, list...)
	f.node.hold = make(chan struct{})
	for _, found := range list {
		f.Add(found.Key)
	}
	atOnce := func() int { f.node.mu.Lock(); defer f.node.mu.Unlock(); return f.node.at }
	require.Eventually(t, func() bool { return atOnce() == 2 }, testkit.Timeout, testkit.Tick)
	close(f.node.hold)
	require.Eventually(t, func() bool {
		return len(slices.DeleteFunc(f.node.done(), func(s string) bool { return !strings.HasPrefix(s, "gone") })) == 10
	}, testkit.Timeout, testkit.Tick)
	require.Equal(t, 2, f.node.most)
}

func TestOneSweepPerThing(t *testing.T) {
	f := newFixture(t, 0, orphan("a"))
	f.node.hold = make(chan struct{})
	key := observe.Key{ID: "a"}
	f.Add(key)
	require.Eventually(t, func() bool { f.node.mu.Lock(); defer f.node.mu.Unlock(); return f.node.at == 1 }, testkit.Timeout, testkit.Tick)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, f.Sweep(ctx, key, nil, false).Err, context.Canceled, "a waiting caller can cancel")
	var wg sync.WaitGroup
	wg.Go(func() { require.Equal(t, sweep.Gone, f.Sweep(t.Context(), key, nil, false).Outcome) })
	close(f.node.hold)
	wg.Wait()
	require.Equal(t, 1, f.node.most)
}

func TestSweepIsLinkedToTheCreate(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	before := otel.GetTracerProvider()
	otel.SetTracerProvider(sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)))
	defer otel.SetTracerProvider(before)
	f := newFixture(t, 0, orphan("a"))
	require.Equal(t, sweep.Deleted, f.Sweep(t.Context(), observe.Key{ID: "a"}, nil, false).Outcome)
	spans := recorder.Ended()
	require.Len(t, spans, 1)
	require.Equal(t, "janitor.sweep", spans[0].Name())
	require.Len(t, spans[0].Links(), 1)
	require.Equal(t, "0af7651916cd43dd8448eb211c80319c", spans[0].Links()[0].SpanContext.TraceID().String())
}

func TestEvents(t *testing.T) {
	for name, c := range map[string]struct {
		change func(f *observe.Finding)
		want   string
	}{
		"its Sandbox is gone": {func(*observe.Finding) {}, "Warning OrphanRemoved removed container a of sandbox ns/one on node n: its Sandbox is gone"},
		"its Sandbox is there": {func(f *observe.Finding) {
			f.ResourceUID, f.Observation.Resource.UID, f.Verdict.Reason = "m", "u", verdict.AgentPodGone
		}, "Warning OrphanRemoved removed container a of sandbox ns/one on node n: the Pod of its agent is gone"},
		"a slot": {func(f *observe.Finding) {
			f.Observation.Identity, f.Verdict.Reason = identity.Identity{State: identity.StateSlot}, verdict.AgentPodGone
		}, "Warning OrphanRemoved removed slot a on node n: the Pod of its agent is gone"},
		"a leftover": {func(f *observe.Finding) {
			f.Key = observe.Key{ID: "a", Remnant: true, Kind: verdict.Cgroup}
		}, "Normal LeftoverRemoved removed what was left of container a: cgroup"},
	} {
		t.Run(name, func(t *testing.T) {
			recorder := events.NewFakeRecorder(1)
			f := orphan("a")
			c.change(&f)
			sweep.Reporter(recorder, "n")(f)
			require.Equal(t, c.want, <-recorder.Events)
		})
	}
}

// related records what Events are related to.
type related []string

func (r *related) Eventf(_, to runtime.Object, _, _, _, _ string, _ ...any) {
	*r = append(*r, to.(*corev1.ObjectReference).Name)
}

// TestEventsOfTwoContainersAreTwo: recorders aggregate Events that differ only in their text, so that only the first container
// removed from a node would be reported.
func TestEventsOfTwoContainersAreTwo(t *testing.T) {
	got := &related{}
	tell := sweep.Reporter(got, "n")
	tell(orphan("a"))
	tell(orphan("b"))
	require.Equal(t, related{"a", "b"}, *got)
}

// TestMeasuredSpace: only snapshots and logs take space on the disk; a dry run measures what it would free.
func TestMeasuredSpace(t *testing.T) {
	for kind, want := range map[verdict.Kind]int64{
		verdict.Snapshot: 100, verdict.Log: 100, verdict.FIFOs: 0, verdict.Mount: 0, verdict.Cgroup: 0, verdict.Bundle: 0, verdict.Shim: 0, verdict.Range: 0,
	} {
		t.Run(kind.String(), func(t *testing.T) {
			key := observe.Key{ID: "a", Remnant: true, Kind: kind}
			f := newFixture(t, 0, observe.Finding{
				Key: key, Remnant: &verdict.Remnant{ContainerID: "a", Kind: kind}, Verdict: verdict.Verdict{Action: verdict.Delete, Reason: verdict.Leftover},
				Orphan: time.Unix(1, 0),
			})
			dry := f.Sweep(t.Context(), key, nil, true)
			require.Equal(t, sweep.WouldDelete, dry.Outcome)
			require.Equal(t, want, dry.FreedBytes)
			swept := f.Sweep(t.Context(), key, nil, false)
			require.Equal(t, sweep.Deleted, swept.Outcome)
			require.Equal(t, want, swept.FreedBytes)
			require.InDelta(t, 1, f.metric(t, "fastsandbox_janitor_deletions_total", kind.String(), "leftover"), 0)
		})
	}
}
