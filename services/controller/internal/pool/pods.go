package pool

import (
	"context"
	"fmt"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// agentPods creates and deletes agent Pods. It records each change in the expectations, in a metric and as an Event.
type agentPods struct {
	config     Config
	expect     *expectations
	drains     *drains
	certs      *certificates
	operations *prometheus.CounterVec
}

func newAgentPods(cfg Config, expect *expectations, d *drains, certs *certificates) (*agentPods, error) {
	a := &agentPods{config: cfg, expect: expect, drains: d, certs: certs, operations: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "fastsandbox_controller_agent_pods_total", Help: "Agent Pods that were created and deleted, by reason."},
		[]string{"operation", "reason"})}
	if err := cfg.Metrics.Register(a.operations); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return a, nil
}

// deleteFinished deletes Pods that have terminated by themselves.
func (a *agentPods) deleteFinished(ctx context.Context, i *inventory) error {
	for _, p := range i.finished {
		if _, err := a.delete(ctx, i, p, reasonPodFinished, client.Preconditions{UID: &p.UID}); err != nil {
			return err
		}
	}
	return nil
}

// create creates agent Pods.
func (a *agentPods) create(ctx context.Context, i *inventory, n int) error {
	logr.FromContextOrDiscard(ctx).Info("creating agents", obs.KeyCount, n, obs.KeyActive, i.load.Active, obs.KeyPending, i.load.Pending)
	for range n {
		pod, err := a.config.Injection.Pod(i.pool, podName(i.pool))
		if err != nil {
			return err
		}
		if err := a.config.Client.Create(ctx, pod); err != nil {
			a.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeWarning, "CreateFailed", "CreateAgent", "creating an agent Pod: %s", truncate(err.Error()))
			return fmt.Errorf("creating agent pod: %w", err)
		}
		a.expect.created(i.name, pod.UID)
		i.expected++
		a.operations.WithLabelValues("create", "missing").Inc()
		a.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentCreated", "CreateAgent", "created agent Pod %s", pod.Name)
		if err := a.certs.issue(ctx, i.name, pod); err != nil {
			return err
		}
	}
	return nil
}

// Reasons for deletions of Pods, besides those for draining an agent.
const (
	reasonPodFinished = "finished"
	reasonNeverReady  = "never ready"
)

// delete deletes a Pod, and reports false if the precondition is not met.
func (a *agentPods) delete(ctx context.Context, i *inventory, p *corev1.Pod, reason string, precondition client.Preconditions) (bool, error) {
	err := a.config.Client.Delete(ctx, p, precondition)
	if apierrors.IsConflict(err) {
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("deleting agent pod %s: %w", p.Name, err)
	}
	a.expect.deleted(i.name, p.UID)
	a.drains.forget(p.UID)
	delete(i.members, p.Name)
	a.operations.WithLabelValues("delete", metricReason(reason)).Inc()
	a.config.Recorder.Eventf(i.pool, nil, corev1.EventTypeNormal, "AgentDeleted", "DeleteAgent", "deleted agent Pod %s: %s", p.Name, reason)
	logr.FromContextOrDiscard(ctx).Info("agent deleted", obs.KeyAgent, p.Name, obs.KeyReason, reason)
	return true, nil
}

// metricReason returns a reason as the value of a label, for which the text of a person is not suitable.
func metricReason(reason string) string {
	if drainedByController(reason) || reason == reasonPodFinished || reason == reasonNeverReady {
		return reason
	}
	return "requested"
}
