package sandbox

import (
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

type metrics struct {
	phases   *prometheus.CounterVec
	calls    *prometheus.HistogramVec
	unplaced *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (metrics, error) {
	m := metrics{
		phases: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_controller_phase_changes_total", Help: "Sandboxes that entered a phase."}, []string{"phase"}),
		calls: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "fastsandbox_controller_agent_call_duration_seconds", Help: "Duration of create and delete calls to agents.",
			Buckets: obs.LatencyBuckets}, []string{"call", "result"}),
		unplaced: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_controller_unplaced_total", Help: "Sandboxes for which no agent was found, by reason."}, []string{"reason"}),
	}
	for _, c := range []prometheus.Collector{m.phases, m.calls, m.unplaced} {
		if err := r.Register(c); err != nil {
			return metrics{}, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return m, nil
}

// timeCall starts the measurement of a call to an agent. The function that it returns ends it.
func (m metrics) timeCall(call string, c clock.PassiveClock) func(error) {
	started := c.Now()
	return func(err error) {
		result := "ok"
		if err != nil {
			result = "error"
		}
		m.calls.WithLabelValues(call, result).Observe(c.Since(started).Seconds())
	}
}
