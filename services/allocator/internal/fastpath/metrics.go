package fastpath

import (
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// Metrics are the fast path's metrics.
type Metrics struct {
	creates *prometheus.CounterVec
	latency *prometheus.HistogramVec
	adopted prometheus.Counter
}

// NewMetrics registers the metrics.
func NewMetrics(r prometheus.Registerer) *Metrics {
	m := &Metrics{
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_creates_total", Help: "Create calls by mode and outcome: OK, or the reason of the error.",
		}, []string{"mode", "outcome"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "fastsandbox_create_duration_seconds", Help: "Time of successful create calls.", Buckets: obs.LatencyBuckets,
		}, []string{"mode"}),
		adopted: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_adoptions_total", Help: "Sandboxes whose custom resource was written from their agent's record.",
		}),
	}
	r.MustRegister(m.creates, m.latency, m.adopted)
	return m
}

func (m *Metrics) created(mode sandboxv1.ConsistencyMode, err error, d time.Duration) {
	name := strings.ToLower(strings.TrimPrefix(mode.String(), "CONSISTENCY_MODE_"))
	outcome := "OK"
	if err != nil {
		if outcome = string(fault.ReasonOf(err)); outcome == "" {
			outcome = string(fault.Internal)
		}
	} else {
		m.latency.WithLabelValues(name).Observe(d.Seconds())
	}
	m.creates.WithLabelValues(name, outcome).Inc()
}
