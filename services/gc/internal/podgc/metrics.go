package podgc

import (
	"errors"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
)

type metrics struct {
	deleting, errors *prometheus.CounterVec
	quarantined      prometheus.Gauge
	round            prometheus.Histogram
}

// The classes of namespaces: names of namespaces would be unbounded labels.
const (
	classSystem = "system"
	classUser   = "user"
)

// namespaceClass returns system for the namespaces of Kubernetes and of this project, user for all others.
func namespaceClass(namespace string) string {
	if strings.HasPrefix(namespace, "kube-") || namespace == "fast-sandbox-system" {
		return classSystem
	}
	return classUser
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	labels := []string{"reason", "namespace_class"}
	m := &metrics{
		deleting: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_gc_deleting_pods_total", Help: "Deletions of Pods that were attempted, by reason."}, labels),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_gc_deleting_pods_error_total", Help: "Deletions of Pods that failed, by reason."}, labels),
		quarantined: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "fastsandbox_gc_quarantined_nodes", Help: "Nodes that Pods are bound to and that are not known."}),
		round: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "fastsandbox_gc_pods_round_seconds", Help: "Duration of a round over all Pods, deletions included.", Buckets: obs.LatencyBuckets}),
	}
	for _, reason := range plan.Reasons() { // create all series at the start, for rates
		for _, class := range []string{classSystem, classUser} {
			m.deleting.WithLabelValues(string(reason), class)
			m.errors.WithLabelValues(string(reason), class)
		}
	}
	return m, errors.Join(r.Register(m.deleting), r.Register(m.errors), r.Register(m.quarantined), r.Register(m.round))
}
