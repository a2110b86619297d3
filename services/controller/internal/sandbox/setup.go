package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/agents"
	"github.com/fast-sandbox/fast-sandbox/services/controller/internal/fields"
)

type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]

// SetupWithManager adds the reconciler and its goroutines to a manager, whose cache must have the indexes of package fields.
func (r *Reconciler) SetupWithManager(m manager.Manager) error {
	r.config.Index.Subscribe(agents.Subscriber{Sandbox: r.changed.Send, Synced: func() { r.resynced.Send(struct{}{}) }})
	for _, runnable := range []manager.Runnable{r.changed, r.resynced, r.background} {
		if err := m.Add(runnable); err != nil {
			return fmt.Errorf("adding to the manager: %w", err)
		}
	}
	err := ctrl.NewControllerManagedBy(m).
		Named("sandbox").
		For(&v1alpha1.Sandbox{}).
		Watches(&corev1.Pod{}, handler.EnqueueRequestsFromMapFunc(r.sandboxesOfAgent), builder.WithPredicates(onlyDeletes())).
		Watches(&v1alpha1.SandboxPool{}, handler.EnqueueRequestsFromMapFunc(r.finishedSandboxesOfPool), builder.WithPredicates(ttlChanges())).
		WatchesRawSource(r.changed.Source(handler.TypedFuncs[types.NamespacedName, reconcile.Request]{
			GenericFunc: func(_ context.Context, e event.TypedGenericEvent[types.NamespacedName], q queue) {
				q.Add(reconcile.Request{NamespacedName: e.Object})
			}})).
		WatchesRawSource(r.resynced.Source(handler.TypedFuncs[struct{}, reconcile.Request]{
			GenericFunc: func(ctx context.Context, _ event.TypedGenericEvent[struct{}], q queue) { r.enqueueAssigned(ctx, q) }})).
		WithOptions(controller.Options{MaxConcurrentReconciles: r.config.Workers, RateLimiter: retries()}).
		Complete(r)
	if err != nil {
		return fmt.Errorf("setting up the sandbox controller: %w", err)
	}
	return nil
}

// onlyDeletes passes deletions.
func onlyDeletes() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(event.UpdateEvent) bool { return false },
	}
}

// ttlChanges passes pools whose ttlAfterFinished has changed. Sandboxes without a pool use the default.
func ttlChanges() predicate.Predicate {
	return predicate.Funcs{
		CreateFunc: func(event.CreateEvent) bool { return false },
		UpdateFunc: func(e event.UpdateEvent) bool {
			old, ok := e.ObjectOld.(*v1alpha1.SandboxPool)
			next, ok2 := e.ObjectNew.(*v1alpha1.SandboxPool)
			return ok && ok2 && !ptr.Equal(old.Spec.TTLAfterFinished, next.Spec.TTLAfterFinished)
		},
	}
}

// sandboxesOfAgent returns the sandboxes that are assigned to an agent Pod that was deleted: its reports need not be waited for.
func (r *Reconciler) sandboxesOfAgent(ctx context.Context, pod client.Object) []reconcile.Request {
	return r.requests(ctx, func(*v1alpha1.Sandbox) bool { return true },
		client.InNamespace(pod.GetNamespace()), client.MatchingFields{fields.Agent: string(pod.GetUID())})
}

// finishedSandboxesOfPool returns the finished sandboxes to which the pool's ttlAfterFinished applies.
func (r *Reconciler) finishedSandboxesOfPool(ctx context.Context, pool client.Object) []reconcile.Request {
	return r.requests(ctx, func(s *v1alpha1.Sandbox) bool { return s.Status.FinishTime != nil && s.Spec.TTLAfterFinished == nil },
		client.InNamespace(pool.GetNamespace()), client.MatchingFields{fields.Pool: pool.GetName()})
}

// enqueueAssigned enqueues all assigned sandboxes: the Registry was read again, and may no longer have their agents.
func (r *Reconciler) enqueueAssigned(ctx context.Context, q queue) {
	for _, request := range r.requests(ctx, func(s *v1alpha1.Sandbox) bool { return s.Annotations[v1alpha1.AnnotationAssignment] != "" }) {
		q.Add(request)
	}
}

// requests lists sandboxes of the cache. An error is logged: it means that the process is shutting down.
func (r *Reconciler) requests(ctx context.Context, include func(*v1alpha1.Sandbox) bool, opts ...client.ListOption) []reconcile.Request {
	var list v1alpha1.SandboxList
	if err := r.config.Client.List(ctx, &list, opts...); err != nil {
		logr.FromContextOrDiscard(ctx).Error(err, "listing sandboxes", obs.KeyKind, "Sandbox")
		return nil
	}
	var out []reconcile.Request
	for i := range list.Items {
		if s := &list.Items[i]; include(s) {
			out = append(out, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(s)})
		}
	}
	return out
}

// retries returns the delays after errors: 5 ms, doubling up to 5 s.
func retries() workqueue.TypedRateLimiter[reconcile.Request] {
	return workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](5*time.Millisecond, 5*time.Second)
}
