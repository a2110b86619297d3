package meter_test

import (
	"context"

	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/meter"
	"github.com/fast-sandbox/fast-sandbox/agent/internal/usage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// node has containers with what they use.
type node struct {
	clock *clocktesting.FakeClock

	mu      sync.Mutex
	used    map[string]usage.Usage
	running []meter.Container
	reads   map[string]int
	enter   func() // of each reading, without the lock
}

func newNode() (*node, *meter.Meter) {
	n := &node{clock: clocktesting.NewFakeClock(time.Unix(1000, 0)), used: map[string]usage.Usage{}, reads: map[string]int{}}
	return n, meter.New(meter.Config{Runtime: n, Running: n.list, Pool: "p", Clock: n.clock})
}

func (n *node) Usage(_ context.Context, id string, _ bool) (usage.Usage, error) {
	n.mu.Lock()
	n.reads[id]++
	u, ok := n.used[id]
	enter := n.enter
	n.mu.Unlock()
	if enter != nil {
		enter()
	}
	if !ok {
		return u, errdefs.ErrNotFound
	}
	return u, nil
}

func (n *node) list() []meter.Container {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]meter.Container{}, n.running...)
}

// uses sets what a container uses.
func (n *node) uses(id string, cpu time.Duration, memory, kills int64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	processes := int64(3)
	n.used[id] = usage.Usage{
		CPU: usage.CPU{Total: &cpu}, Memory: usage.Memory{WorkingSet: &memory, Peak: &memory, OOMKills: &kills}, PIDs: usage.PIDs{Current: &processes},
	}
}

func (n *node) starts(id string) meter.Container {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := meter.Container{ID: id, Started: n.clock.Now()}
	n.running = append(n.running, c)
	return c
}

func (n *node) count(id string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.reads[id]
}

// TestReadersShareReadings: whatever their number, readers of one container within maxAge cost one reading.
func TestReadersShareReadings(t *testing.T) {
	n, m := newNode()
	n.uses("a", time.Second, 1, 0)
	n.uses("b", time.Second, 1, 0)
	c := n.starts("a")
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	n.enter = func() { entered <- struct{}{}; <-release }
	var wg sync.WaitGroup
	for range 100 {
		wg.Go(func() {
			r, err := m.Read(t.Context(), c, time.Second)
			if err != nil || *r.CPU.Total != time.Second || !r.At.Equal(n.clock.Now()) {
				t.Errorf("got %v, %v", r, err)
			}
		})
	}
	<-entered
	close(release)
	wg.Wait()
	require.Equal(t, 1, n.count("a"))

	n.enter = nil
	n.uses("a", 2*time.Second, 1, 0)
	n.clock.Step(time.Second)
	r, err := m.Read(t.Context(), c, time.Second)
	require.NoError(t, err)
	require.Equal(t, time.Second, *r.CPU.Total, "it is young enough")
	n.clock.Step(time.Millisecond)
	r, err = m.Read(t.Context(), c, time.Second)
	require.NoError(t, err)
	require.Equal(t, 2*time.Second, *r.CPU.Total)
	require.Equal(t, 2, n.count("a"))
	_, err = m.Read(t.Context(), n.starts("b"), time.Hour)
	require.NoError(t, err)
	require.Equal(t, 1, n.count("b"), "each container has readings of its own")
}

// TestReaderLeaves: a reader that leaves fails no other one.
func TestReaderLeaves(t *testing.T) {
	n, m := newNode()
	n.uses("a", time.Second, 1, 0)
	c := n.starts("a")
	release, entered := make(chan struct{}), make(chan struct{}, 1)
	n.enter = func() { entered <- struct{}{}; <-release }
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := m.Read(ctx, c, 0)
		left <- err
	}()
	<-entered
	stays := make(chan error, 1)
	go func() {
		_, err := m.Read(context.Background(), c, time.Hour)
		stays <- err
	}()
	cancel()
	require.ErrorIs(t, <-left, context.Canceled)
	close(release)
	require.NoError(t, <-stays)
	_, err := m.Read(t.Context(), meter.Container{ID: "none"}, time.Hour)
	require.ErrorIs(t, err, errdefs.ErrNotFound)
}

func collected(m *meter.Meter) []prometheus.Metric {
	ch := make(chan prometheus.Metric, 100)
	m.Collect(ch)
	close(ch)
	var out []prometheus.Metric
	for metric := range ch {
		out = append(out, metric)
	}
	return out
}

// requireMetrics compares metrics of the meter, which lines of names and values describe.
func requireMetrics(t *testing.T, m *meter.Meter, want string) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	require.NoError(t, registry.Register(m))
	families, err := registry.Gather()
	require.NoError(t, err)
	got := map[string]float64{}
	for _, f := range families {
		for _, metric := range f.GetMetric() {
			require.Equal(t, "p", metric.GetLabel()[0].GetValue())
			got[strings.TrimPrefix(f.GetName(), "fastsandbox_agent_")] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
		}
	}
	for line := range strings.Lines(want) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		require.Equal(t, value, strconv.FormatFloat(got[name], 'f', -1, 64), name)
	}
}

// TestMetrics: the counters have what all sandboxes have used, each once, and never go backwards.
func TestMetrics(t *testing.T) {
	n, m := newNode()
	n.uses("old", 100*time.Second, 5, 7)
	n.mu.Lock()
	n.running = append(n.running, meter.Container{ID: "old", Started: n.clock.Now().Add(-time.Hour)})
	n.mu.Unlock()
	n.uses("a", 2*time.Second, 10, 1)
	a := n.starts("a")
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 2\nsandboxes_memory_working_set_bytes 15\nsandboxes_oom_kills_total 1\nsandboxes_processes 6\n")

	later := func() { n.clock.Step(2 * time.Second) }
	later()
	n.uses("old", 101*time.Second, 5, 7)
	n.uses("a", time.Second, 10, 0) // backwards
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 3\nsandboxes_oom_kills_total 1\n")
	later()
	n.uses("a", 4*time.Second, 10, 1)
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 5\nsandboxes_oom_kills_total 1\n")

	n.uses("a", 6*time.Second, 10, 3)
	m.Ended(t.Context(), a)
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 7\nsandboxes_memory_working_set_bytes 5\nsandboxes_oom_kills_total 3\nsandboxes_processes 3\n")
	m.Ended(t.Context(), a)
	n.mu.Lock()
	n.running = n.running[:1]
	n.mu.Unlock()
	later()
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 7\nsandboxes_oom_kills_total 3\n")

	// One that lived between two scrapes counts, one whose cgroup is gone does not.
	n.uses("short", 500*time.Millisecond, 1, 0)
	m.Ended(t.Context(), meter.Container{ID: "short", Started: n.clock.Now()})
	m.Ended(t.Context(), meter.Container{ID: "gone", Started: n.clock.Now()})
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 7.5\n")
	require.Len(t, collected(m), 5, "no metric is of one sandbox")
}

// TestEndDuringScrape: a sandbox that ends while a scrape reads is counted once.
func TestEndDuringScrape(t *testing.T) {
	n, m := newNode()
	n.uses("a", time.Second, 10, 0)
	a := n.starts("a")
	release, entered := make(chan struct{}), make(chan struct{}, 2)
	n.enter = func() { entered <- struct{}{}; <-release }
	scraped := make(chan []prometheus.Metric, 1)
	go func() { scraped <- collected(m) }()
	<-entered
	ended := make(chan struct{})
	go func() { defer close(ended); m.Ended(context.Background(), a) }()
	<-entered
	close(release)
	<-ended
	<-scraped
	n.mu.Lock()
	n.enter = nil
	n.mu.Unlock()
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 1\n")
}

// TestEndedAreForgotten: without scrapes, memory for ended sandboxes is bounded.
func TestEndedAreForgotten(t *testing.T) {
	n, m := newNode()
	id := func(i int) string { return strings.Repeat("x", i%50) + string(rune('a'+i/50)) }
	for i := range 3000 {
		n.uses(id(i), time.Millisecond, 1, 0)
		m.Ended(t.Context(), meter.Container{ID: id(i), Started: n.clock.Now()})
		require.LessOrEqual(t, m.Done(), meter.MaxDone+1)
	}
	requireMetrics(t, m, "sandboxes_cpu_seconds_total 3\n")
}
