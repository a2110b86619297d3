package fastpath

import (
	"context"
	"errors"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/writer"
)

// apiPatience is how long a call waits for an API server that does not answer, if its caller would wait longer.
const apiPatience = 5 * time.Second

// DeleteSandbox implements sandboxv1.SandboxServiceServer. The durable fact that it waits for is the custom resource's
// deletion where there is one, and otherwise the container's removal.
func (s *Server) DeleteSandbox(ctx context.Context, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	unlock, err := s.locks.Lock(ctx, key)
	if err != nil {
		return nil, errContext(ctx, "waiting for other work on the sandbox", nil)
	}
	item, ok := s.store.Get(key)
	if !ok {
		unlock()
		return nil, s.missing(key)
	}
	if uid := item.Sandbox.GetUid(); req.GetUid() != "" && req.GetUid() != uid {
		unlock()
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "sandbox %s has the uid %s", key, uid).With("uid", uid)
	}
	before := proto.CloneOf(item.Sandbox)
	if before.GetDeleteTime() == nil {
		before.DeleteTime = timestamppb.New(s.config.Clock.Now())
	}
	before.Status.Phase = sandboxv1.Phase_PHASE_TERMINATING
	if item.Resource != nil {
		defer unlock()
		// The informer may have shown what a writer, its answer lost, is about to send again.
		if job := s.job(item.Sandbox.GetUid()); job != nil {
			if _, _, err := job.Stop(ctx); err != nil {
				return nil, errContext(ctx, "waiting for the write of the sandbox", nil)
			}
		}
		if err := s.deleteResource(ctx, item, item.Resource, req.GetGracePeriod()); err != nil {
			return nil, err
		}
		return &sandboxv1.DeleteSandboxResponse{Sandbox: before}, nil
	}
	// The deletion goes on when the caller leaves: a write that was stopped is not taken up again.
	done := make(chan error, 1)
	s.config.Tasks.Go(func(ctx context.Context) {
		defer unlock()
		done <- s.deleteUnwritten(ctx, item, req.GetGracePeriod())
	})
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		return &sandboxv1.DeleteSandboxResponse{Sandbox: before}, nil
	case <-ctx.Done():
		return nil, errContext(ctx, "deleting the container", nil)
	}
}

// deleteResource deletes a custom resource, and only the one that is meant, and has the container deleted at once.
func (s *Server) deleteResource(ctx context.Context, item store.Item, resource *v1alpha1.Sandbox, grace *durationpb.Duration) error {
	if resource.DeletionTimestamp == nil {
		ctx, cancel := context.WithTimeout(ctx, apiPatience)
		defer cancel()
		if err := s.deleteByUID(ctx, resource); err != nil {
			return err
		}
	}
	s.store.MarkDeleting(item.Key, item.Sandbox.GetUid())
	if item.Fence != nil {
		s.reaper.Drive(item.Fence, grace)
	}
	return nil
}

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

// deleteUnwritten deletes a sandbox whose custom resource was not seen. The key is locked.
func (s *Server) deleteUnwritten(ctx context.Context, item store.Item, grace *durationpb.Duration) error {
	uid := item.Sandbox.GetUid()
	outcome, there := writer.Unknown, (*v1alpha1.Sandbox)(nil) // what a former process wrote is not known
	if job := s.job(uid); job != nil {
		var err error
		if outcome, there, err = job.Stop(ctx); err != nil {
			return err
		}
	} else if current, ok := s.store.Get(item.Key); ok && current.Sandbox.GetUid() == uid && current.Resource != nil {
		outcome, there = writer.Landed, current.Resource // it landed since the caller looked
	}
	if outcome == writer.Unknown {
		if found, err := s.lookup(ctx, item); err == nil && found != nil {
			outcome, there = writer.Landed, found
		} else if err == nil {
			outcome = writer.NotWritten
		}
	}
	if outcome == writer.Landed {
		return s.deleteResource(ctx, item, there, grace)
	}
	s.store.MarkDeleting(item.Key, uid)
	select {
	case <-s.reaper.Drive(item.Fence, grace):
	case <-ctx.Done():
		return ctx.Err()
	}
	s.store.Bury(item.Key, uid)
	if outcome == writer.Unknown {
		s.config.Tasks.Go(func(ctx context.Context) { s.scrub(ctx, item) })
	}
	return nil
}

// lookup asks the API server once for the custom resource of a sandbox; nil if there is none.
func (s *Server) lookup(ctx context.Context, item store.Item) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	found := &v1alpha1.Sandbox{}
	err := s.config.Resources.Get(ctx, client.ObjectKey{Namespace: item.Key.Namespace, Name: item.Key.Name}, found)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case found.EffectiveUID() != item.Sandbox.GetUid():
		return nil, nil
	}
	return found, nil
}

// scrub deletes, once the API server answers again, what a write of unknown outcome may have left of a sandbox that is
// gone. What lands later still is caught by ResourceSeen.
func (s *Server) scrub(ctx context.Context, item store.Item) {
	wait := backoff.NewExponentialBackOff()
	wait.InitialInterval, wait.MaxInterval = 200*time.Millisecond, 5*time.Second
	for {
		found, err := s.lookup(ctx, item)
		if err == nil && found != nil {
			err = s.deleteByUID(ctx, found)
		}
		if err == nil {
			return
		}
		timer := s.config.Clock.NewTimer(wait.NextBackOff())
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C():
		}
	}
}

// ResourceSeen takes a custom resource from the informer. One whose sandbox was deleted before it was seen for the first
// time is a write that landed late: it is deleted.
func (s *Server) ResourceSeen(sb *v1alpha1.Sandbox) {
	s.store.SetResource(sb)
	if sb.DeletionTimestamp != nil || !s.store.Gone(sb.EffectiveUID()) || !s.config.Lead.Leads() {
		return
	}
	s.config.Tasks.Go(func(ctx context.Context) {
		if err := s.deleteByUID(ctx, sb); err != nil && !errors.Is(err, context.Canceled) {
			logr.FromContextOrDiscard(ctx).Error(err, "deleting a custom resource that landed late", "sandbox", sb.Namespace+"/"+sb.Name)
		}
	})
}

// ResourceGone takes the removal of a custom resource from the informer.
func (s *Server) ResourceGone(sb *v1alpha1.Sandbox) { s.store.RemoveResource(sb) }
