package ownergc

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/util/workqueue"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// The names of the queues, which label their metrics.
const (
	queueDelete = "attempt_to_delete"
	queueOrphan = "attempt_to_orphan"
)

// The backoff of an item that failed, or whose answer is not final yet.
const (
	itemFirstRetry = 5 * time.Millisecond
	itemLastRetry  = time.Minute
)

// newQueue returns a queue whose metrics carry its name.
func (c *Collector) newQueue(name string, metrics workqueue.MetricsProvider) workqueue.TypedRateLimitingInterface[graph.Item] {
	return workqueue.NewTypedRateLimitingQueueWithConfig(
		workqueue.NewTypedItemExponentialFailureRateLimiter[graph.Item](itemFirstRetry, itemLastRetry),
		workqueue.TypedRateLimitingQueueConfig[graph.Item]{Name: name, Clock: c.Clock, MetricsProvider: metrics})
}

// queueMetrics implements client-go's MetricsProvider on a registry of ours. The metrics have the names and meanings that
// controllers of Kubernetes give them, with our prefix.
type queueMetrics struct {
	depth, unfinished, longest *prometheus.GaugeVec
	adds, retries              *prometheus.CounterVec
	latency, work              *prometheus.HistogramVec
}

func newQueueMetrics(r prometheus.Registerer) (*queueMetrics, error) {
	label := []string{"name"}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "fastsandbox_workqueue_" + name, Help: help}, label)
	}
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "fastsandbox_workqueue_" + name, Help: help}, label)
	}
	histogram := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "fastsandbox_workqueue_" + name, Help: help, Buckets: obs.LatencyBuckets}, label)
	}
	m := &queueMetrics{
		depth:      gauge("depth", "Items in the queue, by queue."),
		unfinished: gauge("unfinished_work_seconds", "Time that items in progress have taken so far, in total, by queue."),
		longest:    gauge("longest_running_processor_seconds", "Time that the longest item in progress has taken so far, by queue."),
		adds:       counter("adds_total", "Items added to the queue, by queue."),
		retries:    counter("retries_total", "Items added to the queue again after a delay, by queue."),
		latency:    histogram("queue_duration_seconds", "Time from adding an item until its processing begins, by queue."),
		work:       histogram("work_duration_seconds", "Time to process an item, by queue."),
	}
	var problems []error
	for _, c := range []prometheus.Collector{m.depth, m.unfinished, m.longest, m.adds, m.retries, m.latency, m.work} {
		problems = append(problems, r.Register(c))
	}
	return m, errors.Join(problems...)
}

// NewDepthMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewDepthMetric(name string) workqueue.GaugeMetric {
	return m.depth.WithLabelValues(name)
}

// NewAddsMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewAddsMetric(name string) workqueue.CounterMetric {
	return m.adds.WithLabelValues(name)
}

// NewLatencyMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewLatencyMetric(name string) workqueue.HistogramMetric {
	return m.latency.WithLabelValues(name)
}

// NewWorkDurationMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewWorkDurationMetric(name string) workqueue.HistogramMetric {
	return m.work.WithLabelValues(name)
}

// NewUnfinishedWorkSecondsMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewUnfinishedWorkSecondsMetric(name string) workqueue.SettableGaugeMetric {
	return m.unfinished.WithLabelValues(name)
}

// NewLongestRunningProcessorSecondsMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewLongestRunningProcessorSecondsMetric(name string) workqueue.SettableGaugeMetric {
	return m.longest.WithLabelValues(name)
}

// NewRetriesMetric implements workqueue.MetricsProvider.
func (m *queueMetrics) NewRetriesMetric(name string) workqueue.CounterMetric {
	return m.retries.WithLabelValues(name)
}
