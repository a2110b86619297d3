package fastpath

import (
	"context"
	"errors"
	"time"

	"github.com/containerd/errdefs"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/convert"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/admission"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/apiserver"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/create"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// UpdateSandbox implements sandboxv1.SandboxServiceServer. A sandbox whose custom resource is still to be written is waited
// for.
func (s *Server) UpdateSandbox(ctx context.Context, req *sandboxv1.UpdateSandboxRequest) (*sandboxv1.UpdateSandboxResponse, error) {
	sb := req.GetSandbox()
	key := store.Key{Namespace: sb.GetNamespace(), Name: sb.GetName()}
	call := idempotency.Key{Namespace: key.Namespace, RequestID: req.GetRequestId()}
	repeated := false
	updated, shared, err := s.updates.Do(ctx, call, updateDigest(req), func(prior **sandboxv1.Sandbox) (*sandboxv1.Sandbox, error) {
		if prior != nil {
			repeated = true
			return *prior, nil
		}
		return s.update(ctx, key, req)
	})
	if err != nil {
		return nil, err
	}
	// The informer may have shown a later state, which is the answer to a repetition, too.
	if now, ok := s.config.Store.Get(key); ok && now.Sandbox.GetUid() == updated.GetUid() {
		updated = now.Sandbox
	} else if repeated || shared {
		return nil, s.missing(key)
	}
	return &sandboxv1.UpdateSandboxResponse{Sandbox: updated}, nil
}

// updateDigest returns the digest of the requested change.
func updateDigest(req *sandboxv1.UpdateSandboxRequest) string {
	sb := req.GetSandbox()
	return idempotency.Digest([]any{
		sb.GetName(), sb.GetUid(), sb.GetLabels(), convert.SpecFromProto(sb.GetSpec()), req.GetUpdateMask().GetPaths(),
	})
}

func (s *Server) update(ctx context.Context, key store.Key, req *sandboxv1.UpdateSandboxRequest) (*sandboxv1.Sandbox, error) {
	if err := admission.Update(req, s.config.Clock.Now()); err != nil {
		return nil, err
	}
	unlock, err := s.names.Lock(ctx, key)
	if err != nil {
		return nil, fault.FromContext(ctx, "waiting for other work on the sandbox", nil)
	}
	defer unlock()
	item, err := s.find(ctx, key)
	if err == nil {
		item, err = s.load(ctx, item)
	}
	uid := req.GetSandbox().GetUid()
	switch {
	case err != nil:
		return nil, err
	case uid != "" && uid != item.Sandbox.GetUid():
		return nil, otherUID(key, item.Sandbox.GetUid())
	case item.Sandbox.GetDeleteTime() != nil:
		return nil, create.Terminating(key)
	}
	if err := s.awaitWritten(ctx, item); err != nil {
		return nil, err
	}
	updated, err := s.updateResource(ctx, item, req)
	if err != nil {
		return nil, err
	}
	s.config.Store.SetResource(updated)
	return convert.ToProto(updated), nil
}

// awaitWritten waits until the custom resource of a sandbox is written.
func (s *Server) awaitWritten(ctx context.Context, item store.Item) error {
	if item.Resource != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	job, ok := s.persist.Writing(item.Sandbox.GetUid())
	if !ok {
		if now, ok := s.config.Store.Get(item.Key); ok && now.Resource != nil {
			return nil
		}
		return fault.New(errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s is still being adopted", item.Key).RetryIn(time.Second)
	}
	if _, _, err := job.Wait(ctx); err != nil {
		return fault.Wrap(err, errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s is not written to the API server yet", item.Key).
			RetryIn(time.Second)
	}
	return nil
}

// updateResource changes the custom resource, and keeps the request_id in it: a repetition under the next leader, unless another
// update came between, changes nothing.
func (s *Server) updateResource(ctx context.Context, item store.Item, req *sandboxv1.UpdateSandboxRequest) (*v1alpha1.Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, apiserver.CallTimeout)
	defer cancel()
	current := &v1alpha1.Sandbox{}
	err := retry.RetryOnConflict(retry.DefaultBackoff, func() error {
		if err := s.api.Get(ctx, client.ObjectKey{Namespace: item.Key.Namespace, Name: item.Key.Name}, current); err != nil {
			return err
		}
		id := req.GetRequestId()
		switch {
		case current.EffectiveUID() != item.Sandbox.GetUid():
			return s.missing(item.Key)
		case current.DeletionTimestamp != nil:
			return create.Terminating(item.Key)
		case id != "" && current.Annotations[v1alpha1.AnnotationUpdateRequestID] == id:
			return nil
		}
		if err := admission.UpdateInPhase(current, req.GetUpdateMask().GetPaths()); err != nil {
			return err
		}
		admission.Apply(current, req)
		if id != "" {
			if current.Annotations == nil {
				current.Annotations = map[string]string{}
			}
			current.Annotations[v1alpha1.AnnotationUpdateRequestID] = id
		}
		return s.api.Update(ctx, current)
	})
	var f *fault.Error
	switch {
	case err == nil:
		return current, nil
	case errors.As(err, &f):
		return nil, err
	case apierrors.IsNotFound(err):
		return nil, s.missing(item.Key)
	case apierrors.IsInvalid(err):
		return nil, apiserver.Invalid(err, "sandbox.spec")
	case apierrors.IsConflict(err):
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.APIUnavailable, "sandbox %s changes too fast", item.Key).RetryIn(time.Second)
	}
	return nil, apiserver.Unavailable(err)
}
