// Package pool keeps the agent Pods of SandboxPools: as many as desired.Count says, made from the pool's template with
// what an agent needs injected, replaced when they have failed, and drained before they go, for whatever reason they go.
// It never ends an agent that has, or may have, a sandbox. It never writes a spec, and writes a pool's status at most once
// in a reconcile.
package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// PoolField is the name of the cache's index of Sandboxes by spec.poolRef.
const PoolField = "spec.poolRef"

// Agents is how agents are reached. *agents.Conns is one.
type Agents interface {
	// Client is a client of the agent at the address. No I/O.
	Client(address string) (agentv1.AgentServiceClient, error)
	// Ask is the agent's own word on what it has now; an error if it does not answer within about 2 s, or is another one.
	Ask(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
}

// Config is what the controller needs; all of it is required.
type Config struct {
	// Client reads from the cache; Live reads from the API server itself.
	Client client.Client
	Live   client.Reader
	// Index is what is known of agents; Agents are asked to drain.
	Index  *agents.Index
	Agents Agents
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
	// ShrinkDelay is how long a pool must have had too many agents, and an agent no sandbox, before it is drained.
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
	drains  *drains
	pace    *pace
	secrets *secrets
	pods    *prometheus.CounterVec
}

// New returns a reconciler that is not started.
func New(cfg Config) (*Reconciler, error) {
	r := &Reconciler{
		Config: cfg, feed: &feed{}, expect: newExpectations(cfg.Clock), idle: newIdleness(cfg.Clock), drains: newDrains(cfg.Clock), pace: newPace(cfg.Clock),
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
		Watches(&v1alpha1.Sandbox{}, r.ofSandboxes()).
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

// ofSandboxes looks at the pool of each sandbox that changes, gathering the changes as the feed does.
func (r *Reconciler) ofSandboxes() handler.EventHandler {
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	look := func(o client.Object, q queue) {
		if s, ok := o.(*v1alpha1.Sandbox); ok {
			q.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: s.Spec.PoolRef}}, feedDelay)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { look(e.Object, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) { look(e.ObjectNew, q) },
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { look(e.Object, q) },
	}
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
		r.drains.keep(req.NamespacedName, nil)
		r.pace.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues("pool", req.String()))
	s, err := r.survey(ctx, &p)
	if err != nil {
		return reconcile.Result{}, err
	}
	var after time.Duration
	var problem error
	if p.DeletionTimestamp != nil {
		if after, err = r.dissolve(ctx, s); err != nil || s.dissolved {
			return conflictAsDelay(reconcile.Result{}, err)
		}
	} else {
		after, problem = r.converge(ctx, s)
	}
	later, err := r.writeStatus(ctx, s, problem)
	if err != nil {
		return conflictAsDelay(reconcile.Result{}, err)
	}
	var bad *templateError
	if problem != nil && !errors.As(problem, &bad) {
		return conflictAsDelay(reconcile.Result{}, problem)
	}
	if later > 0 && (after == 0 || later < after) {
		after = later
	}
	return reconcile.Result{RequeueAfter: after}, nil // what is wrong with a template, only a change of the pool helps
}

// conflictAsDelay looks again in a moment where the cache was behind.
func conflictAsDelay(result reconcile.Result, err error) (reconcile.Result, error) {
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	return result, client.IgnoreNotFound(err)
}

// converge creates, drains and deletes agents, and returns when to look again. Draining goes on whatever is wrong with
// the template.
func (r *Reconciler) converge(ctx context.Context, s *survey) (time.Duration, error) {
	after, err := r.follow(ctx, s)
	later, failed := r.progress(ctx, s)
	if later > 0 && (after == 0 || later < after) {
		after = later
	}
	if err != nil { // a template that is no good comes first: it has a reason of its own
		return after, err
	}
	return after, failed
}

// follow carries the plan out, up to what draining agents are told.
func (r *Reconciler) follow(ctx context.Context, s *survey) (time.Duration, error) {
	if err := r.Injection.Check(s.pool); err != nil {
		return 0, err
	}
	if err := r.adopt(ctx, s); err != nil {
		return 0, err
	}
	if err := r.secrets.mirror(ctx, s.pool); err != nil {
		return 0, err
	}
	if err := r.clear(ctx, s); err != nil {
		return 0, err
	}
	plan := desired.Next(s.want, s.load, s.agents(r.drains))
	for _, name := range plan.Resume {
		if err := r.resume(ctx, s, s.members[name]); err != nil {
			return 0, err
		}
	}
	if plan.Create > 0 {
		return 0, r.createPods(ctx, s, plan.Create)
	}
	if !r.Index.Synced() { // what the Registry knows of an agent is needed to choose it
		return 0, nil
	}
	for _, name := range plan.Drain {
		if err := r.drain(ctx, s, s.members[name], v1alpha1.DrainOutdated); err != nil {
			return 0, err
		}
	}
	return r.shrink(ctx, s, plan.Idle)
}

// adopt has the pool wait for its agents when it is deleted.
func (r *Reconciler) adopt(ctx context.Context, s *survey) error {
	next := s.pool.DeepCopy()
	if !controllerutil.AddFinalizer(next, v1alpha1.Finalizer) {
		return nil
	}
	return r.patchPool(ctx, s, next)
}

func (r *Reconciler) patchPool(ctx context.Context, s *survey, next *v1alpha1.SandboxPool) error {
	if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(s.pool, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("writing finalizers: %w", err)
	}
	s.pool = next
	return nil
}

// clear deletes Pods that ran out.
func (r *Reconciler) clear(ctx context.Context, s *survey) error {
	for _, p := range s.finished {
		if _, err := r.deletePod(ctx, s, p, "finished", client.Preconditions{UID: &p.UID}); err != nil {
			return err
		}
	}
	return nil
}

func (r *Reconciler) createPods(ctx context.Context, s *survey, n int) error {
	logr.FromContextOrDiscard(ctx).Info("creating agents", "count", n, "active", s.load.Active, "pending", s.load.Pending)
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
		r.pods.WithLabelValues("create", "missing").Inc()
		r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentCreated", "CreateAgent", "created agent Pod %s", pod.Name)
	}
	return nil
}

// deletePod deletes a Pod of which the preconditions hold; false if they do not.
func (r *Reconciler) deletePod(ctx context.Context, s *survey, p *corev1.Pod, reason string, precondition client.Preconditions) (bool, error) {
	err := r.Client.Delete(ctx, p, precondition)
	if apierrors.IsConflict(err) {
		return false, nil
	}
	if client.IgnoreNotFound(err) != nil {
		return false, fmt.Errorf("deleting agent pod %s: %w", p.Name, err)
	}
	r.expect.deleted(s.name, p.UID)
	r.drains.forget(p.UID)
	delete(s.members, p.Name)
	r.pods.WithLabelValues("delete", metricReason(reason)).Inc()
	r.Recorder.Eventf(s.pool, nil, corev1.EventTypeNormal, "AgentDeleted", "DeleteAgent", "deleted agent Pod %s: %s", p.Name, reason)
	logr.FromContextOrDiscard(ctx).Info("deleted agent", "pod", p.Name, "reason", reason)
	return true, nil
}

// metricReason keeps a person's own words out of labels.
func metricReason(reason string) string {
	if ours(reason) || reason == "finished" || reason == "never ready" {
		return reason
	}
	return "requested"
}

// shrink drains agents that have been too many, and idle, all the while, for the delay.
func (r *Reconciler) shrink(ctx context.Context, s *survey, names []string) (time.Duration, error) {
	wait := r.idle.settle(s.name, names)
	after := time.Duration(0)
	for _, name := range names {
		if left := r.ShrinkDelay - wait[name]; left > 0 {
			if after == 0 || left < after {
				after = left
			}
			continue
		}
		if err := r.drain(ctx, s, s.members[name], v1alpha1.DrainScaleDown); err != nil {
			return 0, err
		}
	}
	return after, nil
}

// dissolve drains all agents of a pool that is being deleted, and lets the pool go when none is left.
func (r *Reconciler) dissolve(ctx context.Context, s *survey) (time.Duration, error) {
	if !controllerutil.ContainsFinalizer(s.pool, v1alpha1.Finalizer) {
		s.dissolved = true // others hold it
		return 0, nil
	}
	if err := r.clear(ctx, s); err != nil {
		return 0, err
	}
	for _, name := range slices.Sorted(maps.Keys(s.members)) {
		if m := s.members[name]; m.drain == "" {
			if err := r.drain(ctx, s, m, v1alpha1.DrainPoolDeleted); err != nil {
				return 0, err
			}
		}
	}
	after, err := r.progress(ctx, s)
	if err != nil || s.current() > 0 {
		return max(after, min(r.Requeue, time.Second)), err
	}
	next := s.pool.DeepCopy()
	controllerutil.RemoveFinalizer(next, v1alpha1.Finalizer)
	s.dissolved = true
	return 0, r.patchPool(ctx, s, next)
}

func truncate(s string) string {
	if len(s) > 900 {
		return s[:900]
	}
	return s
}
