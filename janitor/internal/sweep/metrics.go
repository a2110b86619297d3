package sweep

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/observe"
	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Metrics of a Sweeper. nil counts nothing.
type Metrics struct {
	deletions, failures *prometheus.CounterVec
	doubts, unmarked    prometheus.Counter
	age, duration       prometheus.Histogram
	freed               prometheus.Counter
}

// NewMetrics returns metrics, registered.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		deletions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_deletions_total", Help: "Things that were removed, by reason and by what they were.",
		}, []string{"reason", "kind"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_deletion_failures_total", Help: "Removals that failed and are tried again, by reason.",
		}, []string{"reason"}),
		doubts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_unconfirmed_total", Help: "Orphans that nobody could confirm to be orphans and that are looked at again.",
		}),
		unmarked: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_unmarked_logs_total",
			Help: "Outputs that are kept without a note that their container was deleted, as on a full disk: their time is counted from their last line.",
		}),
		age: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_janitor_orphan_age_seconds", Help: "Time from an orphan's being found to its being gone.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 16),
		}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_janitor_deletion_seconds", Help: "How long removals take.", Buckets: prometheus.ExponentialBuckets(0.002, 2, 15),
		}),
		freed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_freed_bytes_total", Help: "Bytes of disk that removals freed.",
		}),
	}
	for _, c := range []prometheus.Collector{m.deletions, m.failures, m.doubts, m.unmarked, m.age, m.duration, m.freed} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// kindOf is what a thing is, as metrics say it.
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
