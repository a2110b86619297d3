package ownergc

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/ownergc/graph"
)

// verbs are the label values of writes.
var verbs = map[graph.Verb]string{graph.Delete: "delete", graph.Patch: "patch", graph.Finalize: "finalize"} //nolint:gochecknoglobals // a constant

type metrics struct {
	syncErrors *prometheus.CounterVec
	writes     *prometheus.CounterVec
	errors     prometheus.Counter
	conflicts  prometheus.Counter
	latency    prometheus.Histogram
}

func newMetrics(r prometheus.Registerer, c *Collector) (*metrics, error) {
	m := &metrics{
		syncErrors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_gc_resources_sync_error_total", Help: "Failures to discover, list or watch resources, by step."}, []string{"what"}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_gc_writes_total", Help: "Objects deleted, patched or finalized, by verb and cause."}, []string{"verb", "cause"}),
		errors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_gc_errors_total", Help: "Items that failed and are retried."}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "fastsandbox_gc_conflicts_total", Help: "Writes that conflicted and were decided again."}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_gc_dependent_deletion_seconds", Help: "Time from learning that an object's owners are deleted until the object was deleted.",
			Buckets: obs.LatencyBuckets}),
	}
	for _, what := range []string{"discovery", "group", "resource"} {
		m.syncErrors.WithLabelValues(what)
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "fastsandbox_gc_" + name, Help: help}, value)
	}
	var problems []error
	for _, collector := range []prometheus.Collector{
		m.syncErrors, m.writes, m.errors, m.conflicts, m.latency,
		gauge("graph_objects", "Objects in the graph of owners.", func() float64 { return float64(c.Size().Objects) }),
		gauge("graph_virtual_owners", "Owners that are referred to and were not observed.", func() float64 { return float64(c.Size().Virtual) }),
		gauge("graph_references", "Owner references.", func() float64 { return float64(c.Size().References) }),
		gauge("attempt_to_delete_depth", "Items that wait to be looked at.", func() float64 { return float64(c.toDelete.Len()) }),
		gauge("attempt_to_orphan_depth", "Items that wait to be orphaned.", func() float64 { return float64(c.toOrphan.Len()) }),
		gauge("failing_resources", "Resources that cannot be listed or watched now.", func() float64 { return float64(len(c.Failing())) }),
	} {
		problems = append(problems, r.Register(collector))
	}
	return m, errors.Join(problems...)
}

func (m *metrics) written(c *Collector, item graph.Item, a graph.Action) {
	m.writes.WithLabelValues(verbs[a.Verb], string(a.Cause)).Inc()
	if a.Verb != graph.Delete {
		return
	}
	c.mu.Lock()
	since, ok := c.since[item]
	c.mu.Unlock()
	if ok {
		m.latency.Observe(c.Clock.Since(since).Seconds())
	}
}
