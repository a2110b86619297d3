// Package podgc deletes Pods that no other component deletes (seed 003). It observes Pods and nodes, calls the pure core (plan),
// asks the API server about nodes that seem to be gone, and performs the deletions. It never deletes an unfinished Pod whose
// phase it could not set to Failed, and never another Pod of the same name. Run and Round must not be called concurrently.
package podgc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/gc/internal/podgc/plan"
)

// Config is what a Collector needs. All fields but Deleted are required.
type Config struct {
	Client kubernetes.Interface
	Pods   corelisters.PodLister
	Nodes  corelisters.NodeLister
	// Threshold is the number of finished Pods to keep; 0 keeps all.
	Threshold int
	// Period is the interval between rounds. Quarantine is how long a node must be unknown before the API server is asked about it.
	Period, Quarantine time.Duration
	// Parallel is the number of concurrent deletions.
	Parallel int
	// Permit is called before each deletion; an error refuses it.
	Permit func() error
	// Deleted, if not nil, is called for each Pod that was deleted. It must not block.
	Deleted func(plan.Deletion)
	Clock   clock.WithTicker
	Metrics prometheus.Registerer
}

// Collector is the controller.
type Collector struct {
	Config

	quarantine *plan.Quarantine
	metrics    *metrics
}

// New returns a collector that is not running.
func New(cfg Config) (*Collector, error) {
	var problems []error
	for name, missing := range map[string]bool{
		"Client": cfg.Client == nil, "Pods": cfg.Pods == nil, "Nodes": cfg.Nodes == nil, "Permit": cfg.Permit == nil,
		"Clock": cfg.Clock == nil, "Metrics": cfg.Metrics == nil, "Period": cfg.Period <= 0, "Parallel": cfg.Parallel <= 0,
	} {
		if missing {
			problems = append(problems, fmt.Errorf("podgc: %s is required", name))
		}
	}
	if err := errors.Join(problems...); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Metrics)
	return &Collector{Config: cfg, quarantine: plan.NewQuarantine(cfg.Quarantine), metrics: m}, err
}

// Run makes a round in each period until ctx ends. The caches behind the listers must have synced.
func (c *Collector) Run(ctx context.Context) error {
	ticker := c.Clock.NewTicker(c.Period)
	defer ticker.Stop()
	for {
		c.Round(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// Round checks all Pods once. Failures are logged and counted; the next round tries again.
func (c *Collector) Round(ctx context.Context) {
	log := logr.FromContextOrDiscard(ctx)
	start := c.Clock.Now()
	o, err := c.observe()
	if err != nil {
		log.Error(err, "listing Pods and nodes")
		return
	}
	due := c.quarantine.Due(start, o.Pods, o.Nodes)
	c.metrics.quarantined.Set(float64(c.quarantine.Waiting()))
	o.Gone = c.gone(ctx, due)
	deletions := plan.Deletions(o)
	slots := make(chan struct{}, c.Parallel)
	var wg sync.WaitGroup
	for _, d := range deletions {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			c.collect(ctx, d)
		})
	}
	wg.Wait()
	c.metrics.round.Observe(c.Clock.Since(start).Seconds())
}

func (c *Collector) observe() (plan.Observation, error) {
	o := plan.Observation{Threshold: c.Threshold}
	pods, err := c.Pods.List(labels.Everything())
	if err != nil {
		return o, fmt.Errorf("listing Pods: %w", err)
	}
	nodes, err := c.Nodes.List(labels.Everything())
	if err != nil {
		return o, fmt.Errorf("listing nodes: %w", err)
	}
	for _, p := range pods {
		o.Pods = append(o.Pods, plan.Pod{
			Namespace: p.Namespace, Name: p.Name, UID: string(p.UID), Node: p.Spec.NodeName, Phase: string(p.Status.Phase),
			StatusReason: p.Status.Reason, Created: p.CreationTimestamp.Time, Terminating: p.DeletionTimestamp != nil,
		})
	}
	for _, n := range nodes {
		o.Nodes = append(o.Nodes, observed(n))
	}
	return o, nil
}

func observed(n *corev1.Node) plan.Node {
	out := plan.Node{Name: n.Name}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			out.Ready = c.Status == corev1.ConditionTrue
		}
	}
	for _, t := range n.Spec.Taints {
		out.OutOfService = out.OutOfService || t.Key == corev1.TaintNodeOutOfService
	}
	return out
}

// gone returns the nodes that do not exist according to the API server. Any other answer means that a node may exist.
func (c *Collector) gone(ctx context.Context, names []string) []string {
	log := logr.FromContextOrDiscard(ctx)
	var out []string
	for _, name := range names {
		_, err := c.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		switch {
		case err == nil:
			c.quarantine.Exists(name)
		case apierrors.IsNotFound(err):
			out = append(out, name)
		default:
			log.Error(err, "getting a node that seems to be gone", obs.KeyNode, name)
		}
	}
	return out
}

// collect deletes one Pod, unless that is not permitted or its phase cannot be set.
func (c *Collector) collect(ctx context.Context, d plan.Deletion) {
	log := logr.FromContextOrDiscard(ctx).WithValues(obs.KeyPod, d.Pod.Namespace+"/"+d.Pod.Name, obs.KeyUID, d.Pod.UID, obs.KeyReason, string(d.Reason))
	if err := c.Permit(); err != nil {
		log.V(2).Info("deletion of Pod not permitted", obs.KeyError, err.Error())
		return
	}
	labels := []string{string(d.Reason), namespaceClass(d.Pod.Namespace)}
	c.metrics.deleting.WithLabelValues(labels...).Inc()
	if err := c.delete(ctx, d); err != nil {
		c.metrics.errors.WithLabelValues(labels...).Inc()
		log.Error(err, "deleting Pod")
		return
	}
	log.Info("deleted Pod", obs.KeyNode, d.Pod.Node)
	if c.Deleted != nil {
		c.Deleted(d)
	}
}
