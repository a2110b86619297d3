// Package sandbox drives Sandbox resources through internal/lifecycle: it observes what is true (the resource, the
// agents' reports, the clock), asks the state machine what follows, and carries that out. It never writes a spec, writes
// the status at most once in a reconcile, and asks for a container's creation only after the assignment is durable, so
// that a process that dies between any two lines leaves nothing that the next one does not find. One worker at a time
// has a sandbox; calls that take long run beside the workers (operations).
package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
)

// Agents is how agents are reached. *agents.Conns is one.
type Agents interface {
	// Client is a client of the agent at the address. No I/O.
	Client(address string) (agentv1.AgentServiceClient, error)
	// Snapshot is the agent's own word on what it has; an error if it does not answer within about 2 s, or is another one.
	// It may be 2 s old.
	Snapshot(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
	// Ask is Snapshot with an answer that is always new.
	Ask(ctx context.Context, address, agentUID string) (*agentv1.AgentSnapshot, error)
}

// Timing are the intervals of seed 002.
type Timing struct {
	// HeartbeatTimeout is how long an agent may be silent before it is asked, and then held lost.
	HeartbeatTimeout time.Duration
	// Requeue is the interval of retries, and the longest time that an unfinished sandbox goes without a look.
	Requeue time.Duration
	// DeletionPoll is the same for a deletion.
	DeletionPoll time.Duration
	// ExpirationThreshold is how long before its expire time a sandbox is looked at again.
	ExpirationThreshold time.Duration
}

// Config is what the controller needs; all of it is required.
type Config struct {
	// Client reads from the cache; Live reads from the API server itself.
	Client client.Client
	Live   client.Reader
	// Allocator reserves and releases places.
	Allocator allocatorv1.AllocatorServiceClient
	// Agents are asked for containers.
	Agents Agents
	// Index is what is known of agents.
	Index *agents.Index
	// Recorder writes Events.
	Recorder events.EventRecorder
	// Clock is the time.
	Clock clock.PassiveClock
	// Timing are the intervals.
	Timing Timing
	// Workers is how many sandboxes are reconciled at once.
	Workers int
	// Metrics takes the controller's metrics.
	Metrics prometheus.Registerer
}

// Reconciler reconciles Sandboxes. Make it with New.
type Reconciler struct {
	Config

	ops     *operations
	feed    *feed
	metrics metrics
}

// New returns a reconciler that is not started.
func New(cfg Config) (*Reconciler, error) {
	r := &Reconciler{Config: cfg, feed: &feed{}}
	r.ops = newOperations(cfg.Clock.Now, r.feed.add)
	var err error
	if r.metrics, err = newMetrics(cfg.Metrics); err != nil {
		return nil, err
	}
	return r, nil
}

// SetupWithManager adds the reconciler and what it owns to a manager.
func (r *Reconciler) SetupWithManager(ctx context.Context, m manager.Manager) error {
	if err := m.GetFieldIndexer().IndexField(ctx, &v1alpha1.Sandbox{}, agentField, byAgent); err != nil {
		return fmt.Errorf("indexing sandboxes by agent: %w", err)
	}
	r.Index.Subscribe(agents.Subscriber{Sandbox: r.feed.add, Synced: func() { r.feed.add(everything) }})
	if err := m.Add(r.ops); err != nil {
		return fmt.Errorf("adding operations: %w", err)
	}
	err := ctrl.NewControllerManagedBy(m).
		Named("sandbox").
		For(&v1alpha1.Sandbox{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(r.sandboxesOn), builder.WithPredicates(predicate.Funcs{
			CreateFunc: func(event.CreateEvent) bool { return false },
			UpdateFunc: func(event.UpdateEvent) bool { return false },
		})).
		WatchesRawSource(source.Func(r.feed.start)).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.Workers, RateLimiter: retries()}).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the sandbox controller: %w", err)
	}
	return nil
}

// agentField is the name of the cache's index of Sandboxes by the uid of the agent Pod that they are assigned to.
const agentField = "assignment.agentUID"

func byAgent(o client.Object) []string {
	s, ok := o.(*v1alpha1.Sandbox)
	if !ok {
		return nil
	}
	if a, err := s.Assignment(); err == nil && a != nil {
		return []string{a.AgentUID}
	}
	return nil
}

// sandboxesOn are those of an agent Pod that is gone: nobody has to wait for its word any more.
func (r *Reconciler) sandboxesOn(ctx context.Context, pod client.Object) []reconcile.Request {
	var list v1alpha1.SandboxList
	if err := r.Client.List(ctx, &list, client.InNamespace(pod.GetNamespace()), client.MatchingFields{agentField: string(pod.GetUID())}); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "listing sandboxes", "pod", pod.GetName())
		return nil
	}
	out := make([]reconcile.Request, len(list.Items))
	for i := range list.Items {
		out[i] = reconcile.Request{NamespacedName: client.ObjectKeyFromObject(&list.Items[i])}
	}
	return out
}

// retries are those after an error: 5 ms, doubling up to 5 s.
func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](5*time.Millisecond, 5*time.Second)
}

// Reconcile brings one sandbox forward. The name `everything` stands for all that are assigned: the Registry was read
// anew, and the agent of any may be gone from it.
func (r *Reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	if req.NamespacedName == everything {
		return reconcile.Result{}, r.feedAssigned(ctx)
	}
	var s v1alpha1.Sandbox
	if err := r.Client.Get(ctx, req.NamespacedName, &s); err != nil {
		if client.IgnoreNotFound(err) != nil {
			return reconcile.Result{}, fmt.Errorf("reading sandbox: %w", err)
		}
		err := r.leftBehind(ctx, req.NamespacedName, "")
		if err == nil {
			r.ops.forget(req.NamespacedName)
		}
		return reconcile.Result{}, err
	}
	if err := r.leftBehind(ctx, req.NamespacedName, s.EffectiveUID()); err != nil {
		return reconcile.Result{}, err
	}
	if r.ops.behind(req.NamespacedName, s.ResourceVersion) {
		return reconcile.Result{RequeueAfter: cacheDelay}, nil
	}
	ctx = logr.NewContext(ctx, logr.FromContextOrDiscard(ctx).WithValues("sandbox", req.String(), "sandboxUID", s.EffectiveUID()))
	return r.newPass(&s).run(ctx)
}

func (r *Reconciler) feedAssigned(ctx context.Context) error {
	var list v1alpha1.SandboxList
	if err := r.Client.List(ctx, &list); err != nil {
		return fmt.Errorf("listing sandboxes: %w", err)
	}
	for i := range list.Items {
		if list.Items[i].Annotations[v1alpha1.AnnotationAssignment] != "" {
			r.feed.add(client.ObjectKeyFromObject(&list.Items[i]))
		}
	}
	return nil
}

// cacheDelay is how soon a cache that is behind is looked at again; its own event is sooner most of the time.
const cacheDelay = 20 * time.Millisecond

// everything is no possible name of a sandbox.
//
//nolint:gochecknoglobals // a constant that the language has no syntax for
var everything = types.NamespacedName{Name: "*"}
