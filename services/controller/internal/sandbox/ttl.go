package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
)

// reasonTTLExpired is the reason of the Event for a Sandbox that is deleted after ttlAfterFinished.
const reasonTTLExpired = "TTLExpired"

// ttl deletes Sandboxes ttlAfterFinished after their process has ended. A Sandbox without a finish time is never deleted: its
// process has not ended, or never ran.
type ttl struct {
	client client.Client
	pools  *pools
	events eventWriter
}

// reconcile deletes the Sandbox if its time has passed, and otherwise requeues it at that time. It only considers what the API
// server has, and deletes that version: a Sandbox that is changed at the same time, for example reset, is not deleted.
func (l *ttl) reconcile(ctx context.Context, t *target) (result, error) {
	finish := t.base.Status.FinishTime
	if finish == nil || t.deleting() || t.resetRequested() && t.base.Status.Phase != v1alpha1.PhaseExpired {
		return result{}, nil
	}
	keep, err := l.duration(ctx, t)
	if err != nil {
		return result{}, err
	}
	if left := finish.Add(keep).Sub(t.now); left > 0 {
		return result{requeue: left}, nil
	}
	err = l.client.Delete(ctx, t.base.DeepCopy(), client.Preconditions{UID: &t.base.UID, ResourceVersion: &t.base.ResourceVersion})
	switch {
	case apierrors.IsConflict(err):
		return result{requeue: cacheDelay}, nil
	case client.IgnoreNotFound(err) != nil:
		return result{}, fmt.Errorf("deleting finished sandbox: %w", err)
	case err == nil:
		logr.FromContextOrDiscard(ctx).Info("finished sandbox deleted", obs.KeyFinishTime, finish.Time, obs.KeyTTLAfterFinished, keep.String())
		l.events.normal(t.sandbox, reasonTTLExpired, "Delete", fmt.Sprintf("the process ended at %s, and ttlAfterFinished is %s", stamp(finish.Time), keep))
	}
	return result{}, nil
}

// duration returns ttlAfterFinished of the Sandbox or else of its pool.
func (l *ttl) duration(ctx context.Context, t *target) (time.Duration, error) {
	if d := t.sandbox.Spec.TTLAfterFinished; d != nil {
		return d.Duration, nil
	}
	pool, err := l.pools.get(ctx, t)
	switch {
	case client.IgnoreNotFound(err) != nil:
		return 0, err
	case err == nil && pool.Spec.TTLAfterFinished != nil:
		return pool.Spec.TTLAfterFinished.Duration, nil
	}
	return v1alpha1.DefaultTTLAfterFinished, nil
}
