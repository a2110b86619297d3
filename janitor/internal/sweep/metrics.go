package sweep

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Metrics of a Sweeper. A nil Metrics counts nothing.
type Metrics struct {
	deletions, failures *prometheus.CounterVec
	doubts, unmarked    prometheus.Counter
	age, duration       prometheus.Histogram
	freed               prometheus.Counter
}

// NewMetrics returns registered metrics.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		deletions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_deletions_total", Help: "Containers and remnants that were removed, by reason and kind.",
		}, []string{"reason", "kind"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_deletion_failures_total", Help: "Removals that failed and are retried, by reason.",
		}, []string{"reason"}),
		doubts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_unconfirmed_total", Help: "Orphans that could not be confirmed and are retried.",
		}),
		unmarked: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_unmarked_logs_total",
			Help: "Logs of deleted containers that are kept without a mark, as on a full disk: their retention is counted from the last write.",
		}),
		age: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_janitor_orphan_age_seconds", Help: "Time from finding an orphan until it was removed.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_janitor_deletion_seconds", Help: "Duration of removals.", Buckets: prometheus.ExponentialBuckets(0.002, 2, 15),
		}),
		freed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_freed_bytes_total", Help: "Disk space that removals freed, in bytes.",
		}),
	}
	for _, c := range []prometheus.Collector{m.deletions, m.failures, m.doubts, m.unmarked, m.age, m.duration, m.freed} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// kindOf returns the label value for the kind of a thing.
func kindOf(f observe.Finding) string {
	switch {
	case f.Key.Remnant:
		return f.Key.Kind.String()
	case f.Observation.Identity.State != "":
		return f.Observation.Identity.State
	}
	return "container"
}

func (m *Metrics) deleted(f observe.Finding, took, age time.Duration, freed int64) {
	if m == nil {
		return
	}
	m.deletions.WithLabelValues(f.Verdict.Reason.String(), kindOf(f)).Inc()
	m.age.Observe(age.Seconds())
	m.duration.Observe(took.Seconds())
	m.freed.Add(float64(freed))
}

func (m *Metrics) failed(r verdict.Reason) {
	if m != nil {
		m.failures.WithLabelValues(r.String()).Inc()
	}
}

func (m *Metrics) unconfirmed() {
	if m != nil {
		m.doubts.Inc()
	}
}

func (m *Metrics) unnoted() {
	if m != nil {
		m.unmarked.Inc()
	}
}
