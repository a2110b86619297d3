package meter

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of all sandboxes together. The label is the pool and never a sandbox: their number is not bounded.
type metrics struct {
	cpu, oomKills, memory, processes *prometheus.Desc
	peak                             prometheus.Histogram
}

func newMetrics(pool string) *metrics {
	labels := prometheus.Labels{"pool": pool}
	return &metrics{
		cpu: prometheus.NewDesc("fastsandbox_agent_sandboxes_cpu_seconds_total",
			"Processor time that the agent's sandboxes have used while it ran, those that have ended included.", nil, labels),
		oomKills: prometheus.NewDesc("fastsandbox_agent_sandboxes_oom_kills_total",
			"Processes of the agent's sandboxes that the kernel has killed because their sandbox reached its memory limit.", nil, labels),
		memory: prometheus.NewDesc("fastsandbox_agent_sandboxes_memory_working_set_bytes",
			"Memory that the agent's running sandboxes use and that the kernel cannot reclaim at once.", nil, labels),
		processes: prometheus.NewDesc("fastsandbox_agent_sandboxes_processes", "Processes and threads in the agent's running sandboxes.", nil, labels),
		peak: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_agent_sandbox_memory_peak_bytes", Help: "The most memory, page cache included, that a sandbox has used, when it ends.",
			Buckets: prometheus.ExponentialBuckets(1<<20, 4, 9), ConstLabels: labels,
		}),
	}
}

var _ prometheus.Collector = (*Meter)(nil)

// Describe implements prometheus.Collector.
func (m *Meter) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.metrics.cpu, m.metrics.oomKills, m.metrics.memory, m.metrics.processes} {
		ch <- d
	}
	m.metrics.peak.Describe(ch)
}

// Collect implements prometheus.Collector. It reads all running containers.
func (m *Meter) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	t := m.sweep(ctx)
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v float64) {
		ch <- prometheus.MustNewConstMetric(d, kind, v)
	}
	send(m.metrics.cpu, prometheus.CounterValue, t.cpu.Seconds())
	send(m.metrics.oomKills, prometheus.CounterValue, float64(t.oomKills))
	send(m.metrics.memory, prometheus.GaugeValue, float64(t.workingSet))
	send(m.metrics.processes, prometheus.GaugeValue, float64(t.processes))
	m.metrics.peak.Collect(ch)
}
