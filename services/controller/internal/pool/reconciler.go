// Package pool reconciles SandboxPools: it creates as many agent Pods as desired.Count says, from the pool's template and what an
// agent needs in addition, replaces those that have failed, and drains every agent before it deletes its Pod. It has the agents
// pull the pool's images. It never deletes an agent that has, or may have, a sandbox; it never writes a spec, and writes a
// pool's status at most once in a reconcile. One worker reconciles a pool at a time.
package pool

import (
	"context"
	"errors"
	"fmt"
	"strings"
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

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/feed"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/pool/desired"
)

// Agents are the connections to agents. *agents.Conns implements it.
type Agents interface {
	// Client returns a client of the agent whose Pod has the uid, at the address. It does no I/O.
	Client(address, agentUID string) (agentv1.AgentServiceClient, error)
	// FreshSnapshot returns the agent's own snapshot. It fails if the agent does not answer within 2 s, or if another agent has
	// the address.
	FreshSnapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
}

// Index has what the agents report to the allocator. *agents.Index implements it.
type Index interface {
	// Subscribe adds a subscriber to changes.
	Subscribe(s agents.Subscriber)
	// Synced reports whether the index follows the Registry now.
	Synced() bool
	// Agent returns an agent by the uid of its Pod.
	Agent(podUID string) (agents.Agent, bool)
	// Pool returns the agents of a pool.
	Pool(pool types.NamespacedName) []agents.Agent
}

// Config has the dependencies of the reconciler. All fields are required.
type Config struct {
	// Client reads from the cache; Live reads from the API server.
	Client client.Client
	Live   client.Reader
	// Index has the agents' reports; Agents are the agents themselves.
	Index  Index
	Agents Agents
	// Recorder writes Events.
	Recorder events.EventRecorder
	// Clock is the time.
	Clock clock.Clock
	// Injection is added to every agent Pod.
	Injection Injection
	// Issuer issues the certificates of agents. It is not used for insecure ones.
	Issuer Issuer
	// Requeue is the interval of retries.
	Requeue time.Duration
	// ShrinkDelay is how long an idle agent must have been surplus before it is drained.
	ShrinkDelay time.Duration
	// Metrics registers the metrics.
	Metrics prometheus.Registerer
}

// Reconciler reconciles SandboxPools. Create it with New.
type Reconciler struct {
	Config

	feed    *feed.Feed[types.NamespacedName]
	expect  *expectations
	idle    *idleness
	drains  *drains
	pins    *pins
	certs   *certificates
	pods    *agentPods
	drainer *drainer
	pinner  *pinner
	status  *statusWriter
}

// New returns a reconciler that is not started.
func New(cfg Config) (*Reconciler, error) {
	r := &Reconciler{
		Config: cfg, feed: feed.New[types.NamespacedName](), expect: newExpectations(cfg.Clock), idle: newIdleness(cfg.Clock),
		drains: newDrains(cfg.Clock), pins: newPins(cfg.Clock), certs: newCertificates(cfg),
	}
	var err error
	if r.pods, err = newAgentPods(cfg, r.expect, r.drains, r.certs); err != nil {
		return nil, err
	}
	r.drainer = &drainer{config: cfg, state: r.drains, expect: r.expect, pods: r.pods}
	r.pinner = &pinner{config: cfg, pins: r.pins}
	r.status = &statusWriter{config: cfg, pace: newPace(cfg.Clock), pinErr: r.pins.err}
	return r, nil
}

// SetupWithManager adds the reconciler to a manager, whose cache must have the indexes of package fields.
func (r *Reconciler) SetupWithManager(m manager.Manager) error {
	r.Index.Subscribe(agents.Subscriber{Pool: r.feed.Send})
	if err := m.Add(r.feed); err != nil {
		return fmt.Errorf("adding to the manager: %w", err)
	}
	err := ctrl.NewControllerManagedBy(m).
		Named("sandboxpool").
		For(&v1alpha1.SandboxPool{}).
		Owns(&corev1.Pod{}).
		Watches(&v1alpha1.Sandbox{}, enqueuePoolOfSandbox()).
		WatchesRawSource(r.feed.Source(handler.TypedFuncs[types.NamespacedName, reconcile.Request]{
			GenericFunc: func(_ context.Context, e event.TypedGenericEvent[types.NamespacedName], q queue) {
				q.AddAfter(reconcile.Request{NamespacedName: e.Object}, gatherDelay)
			}})).
		WithOptions(controller.Options{MaxConcurrentReconciles: 4, RateLimiter: workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](20*time.Millisecond, 10*time.Second)}).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the pool controller: %w", err)
	}
	return nil
}

// gatherDelay is how long changes of a pool's agents and sandboxes are gathered before the pool is reconciled.
const gatherDelay = 50 * time.Millisecond

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// enqueuePoolOfSandbox enqueues the pool of each Sandbox that changes.
func enqueuePoolOfSandbox() handler.EventHandler {
	enqueue := func(o client.Object, q queue) {
		for _, pool := range fields.PoolOf(o) {
			q.AddAfter(reconcile.Request{NamespacedName: types.NamespacedName{Namespace: o.GetNamespace(), Name: pool}}, gatherDelay)
		}
	}
	return handler.Funcs{
		CreateFunc: func(_ context.Context, e event.CreateEvent, q queue) { enqueue(e.Object, q) },
		UpdateFunc: func(_ context.Context, e event.UpdateEvent, q queue) {
			enqueue(e.ObjectNew, q)
			enqueue(e.ObjectOld, q) // the default pool of the namespace may have changed
		},
		DeleteFunc: func(_ context.Context, e event.DeleteEvent, q queue) { enqueue(e.Object, q) },
	}
}

// Reconcile reconciles one pool. It implements reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var p v1alpha1.SandboxPool
	if err := r.Client.Get(ctx, req.NamespacedName, &p); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return reconcile.Result{}, fmt.Errorf("reading pool: %w", err)
		}
		r.expect.forget(req.NamespacedName)
		r.idle.forget(req.NamespacedName)
		r.drains.keep(req.NamespacedName, nil)
		r.pins.keep(req.NamespacedName, nil)
		r.status.pace.forget(req.NamespacedName)
		return reconcile.Result{}, nil
	}
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues(obs.KeyPool, req.String()))
	i, err := r.inventory(ctx, &p)
	if err != nil {
		return reconcile.Result{}, err
	}
	var problem error
	var unbound *unboundError
	requeue, certErr := r.certs.keep(ctx, i)
	if p.DeletionTimestamp != nil {
		released, after, err := r.terminate(ctx, i)
		problem = asUnbound(err, p.Namespace)
		if released || problem != nil && !errors.As(problem, &unbound) {
			return conflictAsDelay(reconcile.Result{}, err)
		}
		requeue = sooner(requeue, after)
	} else {
		after, err := r.reconcileAgents(ctx, i)
		problem = asUnbound(err, p.Namespace)
		requeue = sooner(sooner(requeue, after), r.pinner.pin(ctx, i))
	}
	if problem == nil {
		problem = asUnbound(certErr, p.Namespace)
	}
	later, err := r.status.write(ctx, i, problem)
	if err != nil {
		return conflictAsDelay(reconcile.Result{}, err)
	}
	var invalid *templateError
	if problem != nil && !errors.As(problem, &invalid) { // an invalid template needs a change of the pool
		return conflictAsDelay(reconcile.Result{}, problem)
	}
	return reconcile.Result{RequeueAfter: sooner(requeue, later)}, nil
}

// sooner returns the shorter of two requeue times, of which zero means none.
func sooner(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// conflictAsDelay requeues the pool if the cache is outdated.
func conflictAsDelay(result reconcile.Result, err error) (reconcile.Result, error) {
	if apierrors.IsConflict(err) {
		return reconcile.Result{RequeueAfter: 20 * time.Millisecond}, nil
	}
	return result, client.IgnoreNotFound(err)
}

// reconcileAgents creates, drains and deletes agents, and returns the time after which to look again. Drains continue even if
// the template is invalid.
func (r *Reconciler) reconcileAgents(ctx context.Context, i *inventory) (time.Duration, error) {
	requeue, err := r.carryOut(ctx, i)
	later, drainErr := r.drainer.advance(ctx, i)
	requeue = sooner(requeue, later)
	if err != nil { // it may be an invalid template, which has its own reason
		return requeue, err
	}
	return requeue, drainErr
}

// carryOut carries out the plan of package desired. Agents that it drains are called by drainer.advance.
func (r *Reconciler) carryOut(ctx context.Context, i *inventory) (time.Duration, error) {
	if err := r.Injection.Check(i.pool); err != nil {
		return 0, err
	}
	if err := r.addFinalizer(ctx, i); err != nil {
		return 0, err
	}
	if err := r.pods.deleteFinished(ctx, i); err != nil {
		return 0, err
	}
	plan := desired.Next(i.want, i.load, i.agents(r.drains))
	for _, name := range plan.Resume {
		if err := r.drainer.resume(ctx, i, i.members[name]); err != nil {
			return 0, err
		}
	}
	if plan.Create > 0 {
		return 0, r.pods.create(ctx, i, plan.Create)
	}
	if !r.Index.Synced() { // the choice of agents depends on the Registry
		return 0, nil
	}
	for _, name := range plan.Drain {
		if err := r.drainer.start(ctx, i, i.members[name], v1alpha1.DrainOutdated); err != nil {
			return 0, err
		}
	}
	return r.shrink(ctx, i, plan.Idle)
}

// addFinalizer adds the finalizer, so that the deletion of the pool waits for its agents.
func (r *Reconciler) addFinalizer(ctx context.Context, i *inventory) error {
	next := i.pool.DeepCopy()
	if !controllerutil.AddFinalizer(next, v1alpha1.Finalizer) {
		return nil
	}
	return r.patchPool(ctx, i, next)
}

func (r *Reconciler) patchPool(ctx context.Context, i *inventory, next *v1alpha1.SandboxPool) error {
	if err := r.Client.Patch(ctx, next, client.MergeFromWithOptions(i.pool, client.MergeFromWithOptimisticLock{})); err != nil {
		return fmt.Errorf("writing finalizers: %w", err)
	}
	i.pool = next
	return nil
}

// shrink drains agents that have been surplus for the delay.
func (r *Reconciler) shrink(ctx context.Context, i *inventory, names []string) (time.Duration, error) {
	surplusFor := r.idle.update(i.name, names)
	requeue := time.Duration(0)
	for _, name := range names {
		if left := r.ShrinkDelay - surplusFor[name]; left > 0 {
			requeue = sooner(requeue, left)
			continue
		}
		if err := r.drainer.start(ctx, i, i.members[name], v1alpha1.DrainScaleDown); err != nil {
			return 0, err
		}
	}
	return requeue, nil
}

// terminate drains all agents of a pool that is being deleted, and removes the finalizer when there are none. It reports whether
// the finalizer is removed, and otherwise the time after which to look again.
func (r *Reconciler) terminate(ctx context.Context, i *inventory) (released bool, requeue time.Duration, err error) {
	if !controllerutil.ContainsFinalizer(i.pool, v1alpha1.Finalizer) { // it has the finalizer of another component
		return true, 0, nil
	}
	if err := r.pods.deleteFinished(ctx, i); err != nil {
		return false, 0, err
	}
	for _, m := range i.sorted() {
		if m.drain == "" {
			if err := r.drainer.start(ctx, i, m, v1alpha1.DrainPoolDeleted); err != nil {
				return false, 0, err
			}
		}
	}
	requeue, err = r.drainer.advance(ctx, i)
	if err != nil || i.current() > 0 {
		return false, max(requeue, min(r.Requeue, time.Second)), err
	}
	next := i.pool.DeepCopy()
	controllerutil.RemoveFinalizer(next, v1alpha1.Finalizer)
	return true, 0, r.patchPool(ctx, i, next)
}

// maxMessage bounds the messages of conditions and Events, in bytes.
const maxMessage = 900

// truncate shortens a message to maxMessage without cutting a character in two.
func truncate(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage], "")
}
