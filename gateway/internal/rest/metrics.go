package rest

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	streams  prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_gateway_requests_total", Help: "Requests served, by route, method and HTTP code.",
		}, []string{"route", "method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "fastsandbox_gateway_request_duration_seconds", Help: "Time from the headers of a request to the end of its answer.",
			Buckets: obs.LatencyBuckets,
		}, []string{"route", "method"}),
		streams: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fastsandbox_gateway_streams", Help: "Streams that are open.",
		}),
	}
	for _, c := range []prometheus.Collector{m.requests, m.seconds, m.streams} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("registering metrics: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) observe(e *exchange, method string, took time.Duration) {
	switch method {
	case "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS":
	default:
		method = "other" // a caller may send any word
	}
	m.requests.WithLabelValues(e.route, method, codeLabel(e.code)).Inc()
	if !e.binding.streams() {
		m.seconds.WithLabelValues(e.route, method).Observe(took.Seconds())
	}
}
