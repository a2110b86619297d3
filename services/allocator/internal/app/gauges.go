package app

import (
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
)

func registerGauges(p *parts, c clock.PassiveClock) {
	gauge := func(name, help string, f func() float64) {
		p.metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, f))
	}
	gauge("fastsandbox_pending_writes", "Sandboxes that are not yet written to the API server.", func() float64 { return float64(p.fastpath.Pending()) })
	gauge("fastsandbox_sandboxes", "Known sandboxes.", func() float64 { return float64(p.store.Len()) })
	gauge("fastsandbox_leader", "1 while this replica leads.", func() float64 {
		if p.lead.Leads() {
			return 1
		}
		return 0
	})
	gauge("fastsandbox_agents_ready", "Ready agents.", func() float64 {
		ready, _ := count(p.registry.Agents(c.Now()))
		return float64(ready)
	})
	gauge("fastsandbox_free_places", "Free capacity of ready agents.", func() float64 {
		_, free := count(p.registry.Agents(c.Now()))
		return float64(free)
	})
}

func count(views []registry.View) (ready, free int) {
	for _, v := range views {
		if v.Ready {
			ready++
			free += max(v.Capacity-v.Allocated, 0)
		}
	}
	return ready, free
}
