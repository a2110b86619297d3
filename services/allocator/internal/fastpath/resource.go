package fastpath

import (
	"context"
	"errors"
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

// deleteByUID deletes a custom resource if it still has its uid, and repeats that while the API server does not answer
// and ctx lasts. One that is gone or replaced is deleted already.
func (s *Server) deleteByUID(ctx context.Context, resource *v1alpha1.Sandbox) error {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 50*time.Millisecond, 2*time.Second
	for {
		err := s.config.Resources.Delete(ctx, resource.DeepCopy(), client.Preconditions{UID: &resource.UID})
		if err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil
		}
		if apierrors.IsForbidden(err) || apierrors.IsInvalid(err) {
			return fault.Wrap(err, errdefs.ErrInternal, fault.Internal, "the API server refused the deletion")
		}
		timer := s.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return errAPI(err)
		case <-timer.C():
		}
	}
}

// lookup asks the API server once for the custom resource of a name, if it is that of the uid, or whosever it is if uid is
// empty; nil if there is none.
func (s *Server) lookup(ctx context.Context, name store.Key, uid string) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	select {
	case s.burying <- struct{}{}:
		defer func() { <-s.burying }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	found := &v1alpha1.Sandbox{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: name.Namespace, Name: name.Name}, found)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case uid != "" && found.EffectiveUID() != uid:
		return nil, nil
	}
	return found, nil
}

// ResourceSeen takes a custom resource from the informer. One whose sandbox was deleted before it was seen for the first
// time is a write that landed late, and one that is marked as abandoned is deleted by who marked it, unless that process
// died in between: the leader deletes both, at once or when it comes to lead.
func (s *Server) ResourceSeen(sb *v1alpha1.Sandbox) {
	s.store.SetResource(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	if sb.DeletionTimestamp != nil || !store.Abandoned(sb) && !s.store.Gone(sb.EffectiveUID()) {
		delete(s.late, sb.UID)
		return
	}
	s.late[sb.UID] = sb
	if s.config.Lead.Leads() {
		s.deleteLate(sb)
	}
}

// ResourceGone takes the removal of a custom resource from the informer.
func (s *Server) ResourceGone(sb *v1alpha1.Sandbox) {
	s.store.RemoveResource(sb)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.late, sb.UID)
}

// sweepLate has the custom resources deleted that no leader has, late or abandoned.
func (s *Server) sweepLate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sb := range s.late {
		s.deleteLate(sb)
	}
}

// deleteLate deletes a late or abandoned custom resource in the background. mu is held.
func (s *Server) deleteLate(sb *v1alpha1.Sandbox) {
	s.config.Tasks.Go(func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, sweepInterval) // the next sweep tries again
		defer cancel()
		if err := s.deleteByUID(ctx, sb); err != nil && !errors.Is(err, context.Canceled) {
			logr.FromContextOrDiscard(ctx).Info("deleting a custom resource that should not be there", "sandbox", sb.Namespace+"/"+sb.Name, "err", err.Error())
		}
	})
}
