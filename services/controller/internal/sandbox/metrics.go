package sandbox

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

type metrics struct {
	phases  *prometheus.CounterVec
	calls   *prometheus.HistogramVec
	refused *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (metrics, error) {
	m := metrics{
		phases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_controller_phase_changes_total", Help: "Sandboxes that entered a phase."}, []string{"phase"}),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "fastsandbox_controller_agent_call_duration_seconds", Help: "Duration of calls that create or delete on agents.",
			Buckets: obs.LatencyBuckets}, []string{"call", "result"}),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_controller_unplaced_total", Help: "Sandboxes that found no place, by the reason."}, []string{"reason"}),
	}
	for _, c := range []prometheus.Collector{m.phases, m.calls, m.refused} {
		if err := r.Register(c); err != nil {
			return metrics{}, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return m, nil
}
