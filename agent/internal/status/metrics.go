package status

import (
	"github.com/prometheus/client_golang/prometheus"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

var (
	sandboxesDesc = prometheus.NewDesc("fastsandbox_agent_sandboxes", "Sandboxes on the agent by state.", []string{"state"}, nil)
	capacityDesc  = prometheus.NewDesc("fastsandbox_agent_capacity_sandboxes", "Sandboxes that can run on the agent at a time.", nil, nil)
	acceptingDesc = prometheus.NewDesc("fastsandbox_agent_accepting", "1 while the agent accepts new sandboxes.", nil, nil)
	imagesDesc    = prometheus.NewDesc("fastsandbox_agent_images", "Images on the node.", nil, nil)
)

// stateLabels are the values of the label `state`.
var stateLabels = map[agentv1.SandboxState]string{
	agentv1.SandboxState_SANDBOX_STATE_CREATING: "creating", agentv1.SandboxState_SANDBOX_STATE_RUNNING: "running",
	agentv1.SandboxState_SANDBOX_STATE_STOPPED: "stopped", agentv1.SandboxState_SANDBOX_STATE_FAILED: "failed",
	agentv1.SandboxState_SANDBOX_STATE_TERMINATING: "terminating",
}

var _ prometheus.Collector = (*Hub)(nil)

// Describe implements prometheus.Collector.
func (h *Hub) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sandboxesDesc, capacityDesc, acceptingDesc, imagesDesc} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (h *Hub) Collect(ch chan<- prometheus.Metric) {
	s := h.Snapshot()
	counts := map[agentv1.SandboxState]int{}
	for _, r := range s.GetSandboxes() {
		counts[r.GetState()]++
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for state, label := range stateLabels {
		gauge(sandboxesDesc, float64(counts[state]), label)
	}
	gauge(capacityDesc, float64(s.GetInfo().GetCapacity()))
	gauge(imagesDesc, float64(len(s.GetImages())))
	accepting := 0.0
	if s.GetAccepting() {
		accepting = 1
	}
	gauge(acceptingDesc, accepting)
}
