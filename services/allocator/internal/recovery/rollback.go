package recovery

import (
	"context"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/backoff"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// rollbackTimeout is how long a create that failed waits for its rollback before it is answered.
const rollbackTimeout = 500 * time.Millisecond

// Attempt is a strong create whose custom resource is written.
type Attempt struct {
	Resource *v1alpha1.Sandbox
	// Own says that this call wrote it; if not, a former leader did, which can have answered only once the custom resource
	// said that the process has started.
	Own bool
}

// Rollback has the custom resource of a create that failed deleted in the background, whether it was written or not. From
// then on a repetition of the request is not answered with it, and once it is gone the request begins again: no caller knows
// of that sandbox, and none deleted it. The mark on the resource says so to the other replicas, so that the resource is
// deleted even if this process ends. One that a former leader began stays if its caller may have been answered.
//
// It returns the create's error, which says that the outcome is unknown unless the resource is marked or gone by then.
func (r *Recoverer) Rollback(key store.Key, a Attempt, err error) error {
	r.mu.Lock()
	r.abandoned[callOf(a.Resource)] = struct{}{}
	r.mu.Unlock()
	marked := make(chan struct{})
	r.config.Tasks.Go(func(ctx context.Context) { r.rollback(ctx, key, a, sync.OnceFunc(func() { close(marked) })) })
	timer := r.config.Clock.NewTimer(rollbackTimeout)
	defer timer.Stop()
	select {
	case <-marked:
		return err
	case <-timer.C():
		return fault.Unsettled(err)
	}
}

// RetryRollback is when a caller may repeat a create whose earlier attempt is being rolled back.
const RetryRollback = 250 * time.Millisecond

// RollingBack returns the answer to a repetition that comes before an earlier attempt is rolled back.
func RollingBack() error {
	return fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
		"an earlier attempt of this request_id is being rolled back").RetryIn(RetryRollback))
}

// Abandoned reports whether a custom resource is that of a create that failed.
func (r *Recoverer) Abandoned(sb *v1alpha1.Sandbox) bool {
	if sb == nil {
		return false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.abandoned[callOf(sb)]
	return ok || store.Abandoned(sb)
}

// rollback deletes what a create that failed may have left, once the API server answers.
func (r *Recoverer) rollback(ctx context.Context, key store.Key, a Attempt, marked func()) {
	err := backoff.Retry(ctx, r.config.Clock, backoff.Policy{Initial: 50 * time.Millisecond, Max: time.Second}, func(ctx context.Context) error {
		err := r.rollbackOnce(ctx, key, a, marked)
		if err != nil {
			logr.FromContextOrDiscard(ctx).V(2).Info("rolling back a create again", obs.KeySandbox, key.String(), obs.KeyError, err.Error())
		}
		return err
	})
	if err != nil {
		return // the sandbox stays; its request_id, repeated, is answered with it
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.abandoned, callOf(a.Resource))
}

// rollbackOnce calls marked as soon as nothing can stay.
func (r *Recoverer) rollbackOnce(ctx context.Context, key store.Key, a Attempt, marked func()) error {
	there := &v1alpha1.Sandbox{}
	err := r.config.API.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, there)
	switch {
	case err == nil && sameCall(there, a.Resource):
	case err == nil, apierrors.IsNotFound(err):
		marked()
		return nil
	default:
		return err
	}
	if a.Own && resumed(there) || !a.Own && mayBeAnswered(there) {
		return nil // another process answers for it, or has
	}
	if !store.Abandoned(there) && there.DeletionTimestamp == nil {
		there.Annotations[v1alpha1.AnnotationAbandoned] = "true"
		if err := r.config.API.Update(ctx, there); err != nil {
			return err // one that is gone by now is found to be
		}
		r.config.Store.SetResource(there.DeepCopy())
	}
	marked()
	return r.config.API.DeleteByUID(ctx, there)
}
