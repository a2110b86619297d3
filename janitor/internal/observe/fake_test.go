package observe_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/ctrd"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	grace    = 10 * time.Second
	leftover = time.Minute
	interval = time.Minute
)

// testEnv is a scripted node and a scripted API server, which record what they are asked.
type testEnv struct {
	*observe.NodeState

	clock    *clocktesting.FakeClock
	registry *prometheus.Registry

	mu         sync.Mutex
	asked      []string
	containers map[string]observe.Container
	pieces     []ctrd.Piece
	running    map[string]bool
	pods       map[string]bool
	sandboxes  map[string]*v1alpha1.Sandbox
	fail       map[string]error
	orphans    []observe.Key
	changed    func(id string)
	broken     chan struct{}
	surveyed   func() // called at the end of each survey
	said       []string
}

func newTestEnv(t *testing.T) *testEnv {
	t.Helper()
	w := &testEnv{
		clock: clocktesting.NewFakeClock(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)), containers: map[string]observe.Container{},
		running: map[string]bool{}, pods: map[string]bool{}, sandboxes: map[string]*v1alpha1.Sandbox{}, fail: map[string]error{},
		broken: make(chan struct{}),
	}
	w.registry = prometheus.NewRegistry()
	metrics, err := observe.NewMetrics(w.registry)
	require.NoError(t, err)
	w.NodeState = observe.New(observe.Config{
		Node: w, API: w, Policy: verdict.Policy{Grace: grace, LeftoverGrace: leftover}, ScanInterval: interval, Metrics: metrics,
		Orphan: func(k observe.Key) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.orphans = append(w.orphans, k)
		},
		Clock: w.clock, Log: funcr.New(func(_, args string) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.said = append(w.said, args)
		}, funcr.Options{Verbosity: 2}),
	})
	return w
}

// end ends a state that was not run.
func (w *testEnv) end(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, w.Run(ctx))
}

// synced returns a testEnv in which everything was listed.
func synced(t *testing.T) *testEnv {
	t.Helper()
	w := newTestEnv(t)
	t.Cleanup(func() { w.end(t) })
	w.SetSynced()
	require.NoError(t, w.Scan(t.Context()))
	return w
}

func (w *testEnv) ask(what string) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.asked = append(w.asked, what)
	return w.fail[what]
}

// asking returns the recorded requests of some kinds, and clears the record.
func (w *testEnv) asking(prefixes ...string) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := slices.DeleteFunc(slices.Clone(w.asked), func(s string) bool { return !slices.Contains(prefixes, s) })
	w.asked = nil
	return out
}

func (w *testEnv) List(context.Context) (observe.Listing, error) {
	err := w.ask("list")
	w.mu.Lock()
	defer w.mu.Unlock()
	l := observe.Listing{Pods: map[string]bool{}}
	for _, c := range w.containers {
		l.Containers = append(l.Containers, c)
	}
	for uid := range w.running {
		l.Pods[uid] = true
	}
	return l, err
}

func (w *testEnv) Get(_ context.Context, id string) (observe.Container, error) {
	err := w.ask("get")
	w.mu.Lock()
	defer w.mu.Unlock()
	c, ok := w.containers[id]
	if !ok && err == nil {
		err = fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	}
	return c, err
}

func (w *testEnv) Runs(_ context.Context, uid string) (bool, error) {
	err := w.ask("runs")
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.running[uid], err
}

func (w *testEnv) Survey(_ context.Context, known map[string]bool) ([]ctrd.Piece, error) {
	err := w.ask("survey")
	w.mu.Lock()
	pieces := slices.DeleteFunc(slices.Clone(w.pieces), func(p ctrd.Piece) bool { return known[p.ID] })
	surveyed := w.surveyed
	w.mu.Unlock()
	if surveyed != nil {
		surveyed()
	}
	return pieces, err
}

func (w *testEnv) Events(ctx context.Context, ready func(), changed func(string)) error {
	w.mu.Lock()
	w.changed = changed
	broken := w.broken
	w.mu.Unlock()
	ready()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-broken:
		return errdefs.ErrUnavailable
	}
}

func (w *testEnv) Pods(context.Context) (map[string]bool, error) {
	err := w.ask("pods")
	w.mu.Lock()
	defer w.mu.Unlock()
	out := map[string]bool{}
	for uid := range w.pods {
		out[uid] = true
	}
	return out, err
}

func (w *testEnv) Sandbox(_ context.Context, namespace, name string) (*v1alpha1.Sandbox, error) {
	err := w.ask("sandbox")
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sandboxes[namespace+"/"+name], err
}

// change changes the scripts without notifying the state.
func (w *testEnv) change(f func(w *testEnv)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(w)
}

// logged returns the number of log records with all of the words.
func (w *testEnv) logged(words ...string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, line := range w.said {
		if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
			n++
		}
	}
	return n
}

// gauge returns a metric's value for the given label values, in the order of the label names.
func (w *testEnv) gauge(t *testing.T, name string, labels ...string) float64 {
	t.Helper()
	families, err := w.registry.Gather()
	require.NoError(t, err)
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if family.GetName() == name && slices.Equal(values, labels) {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue()
			}
		}
	}
	require.Fail(t, "no metric "+name)
	return 0
}

// reported returns the orphans that were reported, and clears the record.
func (w *testEnv) reported() []observe.Key {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.orphans
	w.orphans = nil
	return out
}

const (
	uidOne = "0f8fad5b-d9cb-469f-a165-70867728950e"
	idOne  = uidOne + "-1"
	agentA = "agent-a"
)

// one returns a running container of a persisted sandbox that was created an hour ago.
func one(w *testEnv, change ...func(*observe.Container)) observe.Container {
	c := observe.Container{
		ID: idOne, Managed: true, CreatedAt: w.clock.Now().Add(-time.Hour),
		Identity: identity.Identity{
			Namespace: "ns", Name: "one", SandboxUID: uidOne, Attempt: 1, AgentUID: agentA, Pool: "p", State: identity.StateClaimed, Persisted: true,
		},
	}
	for _, f := range change {
		f(&c)
	}
	return c
}

// sandbox returns a Sandbox that assigns an attempt to an agent; without an agent it is not assigned.
func sandbox(uid, agentUID string, attempt int64) *v1alpha1.Sandbox {
	s := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "one", UID: types.UID("meta-" + uid), Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: uid},
	}}
	s.Status.Attempt = attempt
	if agentUID != "" {
		s.SetAssignment(&v1alpha1.Assignment{AgentUID: agentUID, SandboxUID: uid, Attempt: attempt})
	}
	return s
}

// alive adds an agent's Pod, to the cache and to the API server.
func (w *testEnv) alive(uid string) {
	w.change(func(w *testEnv) { w.pods[uid] = true })
	w.SetPod(uid, false)
}

// addContainer puts a container on the node, and scans.
func (w *testEnv) addContainer(t *testing.T, c observe.Container) {
	t.Helper()
	w.change(func(w *testEnv) { w.containers[c.ID] = c })
	require.NoError(t, w.Scan(t.Context()))
}

// write adds a Sandbox, to the cache and to the API server.
func (w *testEnv) write(s *v1alpha1.Sandbox) {
	w.change(func(w *testEnv) { w.sandboxes[s.Namespace+"/"+s.Name] = s })
	w.SetSandbox(&s.ObjectMeta)
}

// erase deletes a Sandbox.
func (w *testEnv) erase(s *v1alpha1.Sandbox) {
	w.change(func(w *testEnv) { delete(w.sandboxes, s.Namespace+"/"+s.Name) })
	w.RemoveSandbox(&s.ObjectMeta)
}

// verdicts returns the reasons by name: a container's id, or a remnant's id and kind.
func (w *testEnv) verdicts(t *testing.T) map[string]verdict.Reason {
	t.Helper()
	found, err := w.Findings()
	require.NoError(t, err)
	out := map[string]verdict.Reason{}
	for _, f := range found {
		name := f.Key.ID
		if f.Key.Remnant {
			name += " " + f.Key.Kind.String()
		}
		out[name] = f.Verdict.Reason
	}
	return out
}

func (w *testEnv) verdict(t *testing.T) verdict.Reason {
	t.Helper()
	all := w.verdicts(t)
	require.Contains(t, all, idOne)
	return all[idOne]
}

func marshal(v any) string {
	raw, err := json.Marshal(v)
	if err != nil {
		return strconv.Quote(err.Error())
	}
	return string(raw)
}
