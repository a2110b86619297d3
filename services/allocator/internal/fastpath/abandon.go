package fastpath

import (
	"context"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// undoPatience is how long a create that failed waits for being undone before it is answered.
const undoPatience = 500 * time.Millisecond

// abandon has the custom resource of a create that failed deleted in the background, whether it was written or not. From
// here on a repetition of the request is not answered with it, and once it is gone the request begins anew: nobody was
// told of that sandbox, and nobody deleted it. The mark on the resource says so to the other replica, so that the resource
// goes, whatever becomes of this process.
// One that a former leader began stays if its caller may have been told of it.
//
// It returns the create's error, which tells that the outcome is not known unless the resource is marked or gone by then.
func (s *Server) abandon(key store.Key, a attempt, err error) error {
	s.mu.Lock()
	s.abandoned[momentOf(a.resource)] = struct{}{}
	s.mu.Unlock()
	undone := make(chan struct{})
	s.config.Tasks.Go(func(ctx context.Context) { s.undo(ctx, key, a, sync.OnceFunc(func() { close(undone) })) })
	timer := s.config.Clock.NewTimer(undoPatience)
	defer timer.Stop()
	select {
	case <-undone:
		return err
	case <-timer.C():
		return fault.Unsettled(err)
	}
}

// momentOf tells one create call from all others: of one name, one moment.
func momentOf(sb *v1alpha1.Sandbox) string {
	return sb.Namespace + "/" + sb.Name + "/" + sb.Annotations[v1alpha1.AnnotationCreateTime]
}

// givenUp tells whether a custom resource is that of a create that failed.
func (s *Server) givenUp(sb *v1alpha1.Sandbox) bool {
	if sb == nil {
		return false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.abandoned[momentOf(sb)]
	return ok || store.Abandoned(sb)
}

// errUndoing is the answer to a repetition that comes before the first try is undone.
func errUndoing() error {
	return fault.Unsettled(fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
		"an earlier try of this request_id is being undone").RetryIn(time.Second))
}

// undo deletes what a create that failed may have left, once the API server answers.
func (s *Server) undo(ctx context.Context, key store.Key, a attempt, undone func()) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 5*time.Second
	for {
		err := s.undoOnce(ctx, key, a, undone)
		if err == nil {
			break
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("undoing a create again", "sandbox", key.String(), "err", err.Error())
		if s.pause(ctx, wait.NextBackOff()) != nil {
			return // the sandbox stays; its request_id, repeated, is answered with it
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.abandoned, momentOf(a.resource))
}

// undoOnce calls undone as soon as nothing can stay.
func (s *Server) undoOnce(ctx context.Context, key store.Key, a attempt, undone func()) error {
	there := &v1alpha1.Sandbox{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, there)
	switch {
	case err == nil && sameMoment(there, a.resource):
	case err == nil, apierrors.IsNotFound(err):
		undone()
		return nil
	default:
		return err
	}
	if a.own && takenUp(there) || !a.own && toldOf(there) {
		return nil // another process answers for it, or has
	}
	if !store.Abandoned(there) && there.DeletionTimestamp == nil {
		there.Annotations[v1alpha1.AnnotationAbandoned] = "true"
		if err := s.config.Resources.Update(ctx, there); err != nil {
			return err // one that has gone meanwhile is found to be
		}
		s.store.SetResource(there.DeepCopy())
	}
	undone()
	return s.deleteByUID(ctx, there)
}
