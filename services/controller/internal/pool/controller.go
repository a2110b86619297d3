// Package pool keeps the agent Pods of SandboxPools: as many as desired.Count says, made from the pool's template with
// what an agent needs injected, and replaced when they have failed. It never ends an agent that has, or may have, a
// sandbox. It never writes a spec, and writes a pool's status at most once in a reconcile.
package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// PoolField is the name of the cache's index of Sandboxes by spec.poolRef.
const PoolField = "spec.poolRef"

// Config is what the controller needs; all of it is required.
type Config struct {
	// Client reads from the cache; Live reads from the API server itself.
	Client client.Client
	Live   client.Reader
	// Index is what is known of agents.
	Index *agents.Index
	// Recorder writes Events.
	Recorder events.EventRecorder
	// Clock is the time.
	Clock clock.PassiveClock
	// Injection is what every agent Pod gets.
	Injection Injection
	// Namespace is the controller's own, which has the agents' certificate.
	Namespace string
	// Requeue is the interval of retries.
	Requeue time.Duration
	// ShrinkDelay is how long a pool must have had too many agents, and an agent no sandbox, before it goes.
	ShrinkDelay time.Duration
	// Metrics takes the controller's metrics.
	Metrics prometheus.Registerer
}

// Reconciler reconciles SandboxPools. Make it with New.
type Reconciler struct {
	Config

	feed    *feed
	expect  *expectations
	idle    *idleness
	secrets *secrets
	pods    *prometheus.CounterVec
}

// New returns a reconciler that is not started.
func New(cfg Config) (*Reconciler, error) {
	r := &Reconciler{
		Config: cfg, feed: &feed{}, expect: newExpectations(cfg.Clock), idle: newIdleness(cfg.Clock),
		secrets: newSecrets(cfg),
		pods: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "fastsandbox_controller_agent_pods_total", Help: "Agent Pods that were created and deleted, by the reason."},
			[]string{"operation", "reason"}),
	}
	if err := cfg.Metrics.Register(r.pods); err != nil {
		return nil, fmt.Errorf("registering metrics: %w", err)
	}
	return r, nil
}

// SetupWithManager adds the reconciler to a manager.
func (r *Reconciler) SetupWithManager(ctx context.Context, m manager.Manager) error {
	r.Index.Subscribe(agents.Subscriber{Pool: r.feed.add})
	byPool := func(o client.Object) []string {
		if s, ok := o.(*v1alpha1.Sandbox); ok {
			return []string{s.Spec.PoolRef}
		}
		return nil
	}
	if err := m.GetFieldIndexer().IndexField(ctx, &v1alpha1.Sandbox{}, PoolField, byPool); err != nil {
		return fmt.Errorf("indexing sandboxes by pool: %w", err)
	}
	err := ctrl.NewControllerManagedBy(m).
		Named("sandboxpool").
		For(&v1alpha1.SandboxPool{}).
		Owns(&corev1.Pod{}).
		Watches(&v1alpha1.Sandbox{}, handler.EnqueueRequestsFromMapFunc(poolOf)).
		Watches(&corev1.Secret{}, handler.EnqueueRequestsFromMapFunc(r.poolsOfSecret)).
		WatchesRawSource(source.Func(r.feed.start)).
		// One for each pool at a time is all that is ever needed; a few for many pools.
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](20*time.Millisecond, 10*time.Second)}).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the pool controller: %w", err)
	}
	return nil
}

func poolOf(_ context.Context, o client.Object) []reconcile.Request {
	s, ok := o.(*v1alpha1.Sandbox)
	if !ok {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: s.Spec.PoolRef}}}
}

// poolsOfSecret are all pools when the certificate that they all use has changed.
func (r *Reconciler) poolsOfSecret(ctx context.Context, o client.Object) []reconcile.Request {
	if o.GetNamespace() != r.Namespace || o.GetName() != r.Injection.TLSSecret {
		return nil
	}
	var list v1alpha1.SandboxPoolList
	if err := r.Client.List(ctx, &list); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "listing pools")
		return nil
	}
	out := make([]reconcile.Request, len(list.Items))
	for i := range list.Items {
		out[i] = reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])}
	}
	return out
}

// Reconcile brings one pool's agents to the number that it should have.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var p v1alpha1.SandboxPool
	if err := r.Client.Get(ctx, req.NamespacedName, &p); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return reconcile.Result{}, fmt.Errorf("reading pool: %w", err)
		}
		r.expect.forget(req.NamespacedName)
		r.idle.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	if p.DeletionTimestamp != nil { // its agents go with it, through their owner reference
		return reconcile.Result{}, nil
	}
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues("pool", req.String()))
	s, err := r.survey(ctx, &p)
	if err != nil {
		return reconcile.Result{}, err
	}
	after, problem := r.converge(ctx, s)
	if err := r.writeStatus(ctx, s, problem); err != nil {
		if apierrors.IsConflict(err) {
			return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
		}
		return reconcile.Result{}, err
	}
	var bad *templateError
	if errors.As(problem, &bad) { // nothing but a change of the pool helps
		return reconcile.Result{}, nil
	}
	if problem != nil {
		return reconcile.Result{}, problem
	}
	return reconcile.Result{RequeueAfter: after}, nil
}

// converge creates and deletes agent Pods, and returns when to look again.
func (r *Reconciler) converge(ctx context.Context, s *survey) (time.Duration, error) {
	if err := r.Injection.Check(s.pool); err != nil {
		return 0, err
	}
	if err := r.secrets.mirror(ctx, s.pool); err != nil {
		return 0, err
	}
	for _, p := range s.finished {
		if err := r.deletePod(ctx, s, p, "finished"); err != nil {
			return 0, err
		}
	}
	if n := desired.Missing(s.want, s.load, s.current()); n > 0 {
		return 0, r.createPods(ctx, s, n, "missing")
	}
	return r.shrink(ctx, s)
}

func (r *Reconciler) createPods(ctx context.Context, s *survey, n int, reason string) error {
	logr.FromContextOrDiscard(ctx).Info("creating agents", "count", n, "reason", reason, "active", s.load.Active, "pending", s.load.Pending)
	for range n {
		pod, err := r.Injection.Pod(s.pool)
		if err != nil {
			return err
		}
		if err := r.Client.Create(ctx, pod); err != nil {
			r.Recorder.Eventf(s.pool, nil, corev1.EventTypeWarning, "CreateFailed", "CreateAgent", "creating an agent Pod: %s", truncate(err.Error()))
			return fmt.Errorf("creating agent pod: %w", err)
		}
		r.expect.created(s.name, pod.UID)
		s.expected++
		r.pods.WithLabelValues("create", reason).Inc()
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentCreated", "CreateAgent", "created agent Pod %s", pod.Name)
	}
	return nil
}

func (r *Reconciler) deletePod(ctx context.Context, s *survey, p *corev1.Pod, reason string) error {
	precondition := client.Preconditions{UID: &p.UID}
	if err := r.Client.Delete(ctx, p, precondition); client.IgnoreNotFound(err) != nil && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting agent pod %s: %w", p.Name, err)
	}
	r.expect.deleted(s.name, p.UID)
	r.pods.WithLabelValues("delete", reason).Inc()
	r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentDeleted", "DeleteAgent", "deleted agent Pod %s: %s", p.Name, reason)
	logr.FromContextOrDiscard(ctx).Info("deleted agent", "pod", p.Name, "reason", reason)
	return nil
}

// shrink deletes agents that are too many, or outdated, and have been idle all the while, for the delay. What the Registry knows of an
// agent is needed for that: without it none goes.
func (r *Reconciler) shrink(ctx context.Context, s *survey) (time.Duration, error) {
	names := desired.Surplus(s.want, s.load, s.agents)
	reason := "idle"
	if len(names) == 0 && s.expected == 0 {
		create, outdated := desired.Rollout(s.want, s.load, s.agents)
		if create > 0 {
			return 0, r.createPods(ctx, s, create, "rollout")
		}
		if outdated != "" {
			names, reason = []string{outdated}, "outdated"
		}
	}
	if !r.Index.Synced() {
		names = nil
	}
	wait := r.idle.settle(s.name, names)
	after := time.Duration(0)
	for _, name := range names {
		if left := r.ShrinkDelay - wait[name]; left > 0 {
			if after == 0 || left < after {
				after = left
			}
			continue
		}
		if err := r.deletePod(ctx, s, s.byName[name], reason); err != nil {
			return 0, err
		}
		s.deleted++
	}
	return after, nil
}

func truncate(s string) string {
	if len(s) > 900 {
		return s[:900]
	}
	return s
}
