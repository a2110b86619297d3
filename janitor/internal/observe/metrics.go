package observe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/janitor/internal/verdict"
)

// Metrics of a NodeState. A nil Metrics counts nothing.
type Metrics struct {
	scans    *prometheus.CounterVec
	duration prometheus.Histogram
	verdicts *prometheus.GaugeVec
	defects  prometheus.Gauge
}

// NewMetrics returns registered metrics.
func NewMetrics(r prometheus.Registerer) (*Metrics, error) {
	m := &Metrics{
		scans: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_janitor_scans_total", Help: "Scans of the whole node, by result.",
		}, []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_janitor_scan_seconds", Help: "Duration of scans of the whole node.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 16),
		}),
		verdicts: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "fastsandbox_janitor_verdicts", Help: "Containers and remnants on the node at the last scan, by verdict and reason.",
		}, []string{"action", "reason"}),
		defects: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fastsandbox_janitor_unreadable_labels", Help: "Managed containers with inconsistent labels at the last scan.",
		}),
	}
	for _, c := range []prometheus.Collector{m.scans, m.duration, m.verdicts, m.defects} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

func (m *Metrics) scanned(d time.Duration, err error) {
	if m == nil {
		return
	}
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.scans.WithLabelValues(result).Inc()
	m.duration.Observe(d.Seconds())
}

// count updates the gauges.
func (v *evidence) count() {
	m := v.config.Metrics
	if m == nil {
		return
	}
	counts := map[verdict.Reason]int{}
	defects := 0
	for _, e := range v.inventory.containers {
		counts[e.last.Verdict.Reason]++
		if e.container.Defect != "" {
			defects++
		}
	}
	for _, r := range v.inventory.remnants {
		counts[r.last.Verdict.Reason]++
	}
	for _, r := range verdict.Reasons() {
		m.verdicts.WithLabelValues(r.Action().String(), r.String()).Set(float64(counts[r]))
	}
	m.defects.Set(float64(defects))
}
