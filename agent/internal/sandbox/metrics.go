package sandbox

import (
	"github.com/prometheus/client_golang/prometheus"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Metrics are the manager's gauges, read when they are asked for.
type Metrics struct {
	manager  *Manager
	states   *prometheus.Desc
	capacity *prometheus.Desc
	ready    *prometheus.Desc
	images   *prometheus.Desc
}

var _ prometheus.Collector = (*Metrics)(nil)

// NewMetrics returns the gauges of m.
func NewMetrics(m *Manager) *Metrics {
	return &Metrics{
		manager:  m,
		states:   prometheus.NewDesc("fastsandbox_agent_sandboxes", "Sandboxes on the agent by state.", []string{"state"}, nil),
		capacity: prometheus.NewDesc("fastsandbox_agent_capacity_sandboxes", "Sandboxes that the agent takes.", nil, nil),
		ready:    prometheus.NewDesc("fastsandbox_agent_accepting", "1 while the agent takes new sandboxes.", nil, nil),
		images:   prometheus.NewDesc("fastsandbox_agent_images", "Images on the node.", nil, nil),
	}
}

// Describe sends the descriptions.
func (c *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.states, c.capacity, c.ready, c.images} {
		ch <- d
	}
}

// Collect sends the values of now.
func (c *Metrics) Collect(ch chan<- prometheus.Metric) {
	c.manager.mu.Lock()
	counts := map[agentv1.SandboxState]int{}
	for _, e := range c.manager.sandboxes {
		counts[e.report.GetState()]++
	}
	images, accepting := len(c.manager.images), c.manager.adopted && c.manager.taking()
	c.manager.mu.Unlock()
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for state, name := range map[agentv1.SandboxState]string{
		agentv1.SandboxState_SANDBOX_STATE_CREATING: "creating", agentv1.SandboxState_SANDBOX_STATE_RUNNING: "running",
		agentv1.SandboxState_SANDBOX_STATE_STOPPED: "stopped", agentv1.SandboxState_SANDBOX_STATE_FAILED: "failed",
		agentv1.SandboxState_SANDBOX_STATE_TERMINATING: "terminating",
	} {
		gauge(c.states, float64(counts[state]), name)
	}
	gauge(c.capacity, float64(c.manager.config.Info.GetCapacity()))
	gauge(c.images, float64(images))
	value := 0.0
	if accepting {
		value = 1
	}
	gauge(c.ready, value)
}
