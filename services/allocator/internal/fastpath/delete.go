package fastpath

import (
	"context"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/deletion"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/idempotency"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// DeleteSandbox implements sandboxv1.SandboxServiceServer. The durable fact that it waits for is the custom resource's
// deletion where there is one and the API server answers, and otherwise the agent's tombstone.
func (s *Server) DeleteSandbox(ctx context.Context, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	key := idempotency.Key{Namespace: req.GetNamespace(), RequestID: req.GetRequestId()}
	digest := idempotency.Digest([]any{req.GetName(), req.GetUid(), req.GetGracePeriod().AsDuration(), req.GetGracePeriod() != nil})
	resp, _, err := s.deletes.Do(ctx, key, digest, func(prior **sandboxv1.DeleteSandboxResponse) (*sandboxv1.DeleteSandboxResponse, error) {
		if prior != nil {
			return *prior, nil
		}
		return s.delete(ctx, req)
	})
	return resp, err
}

func (s *Server) delete(ctx context.Context, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	unlock, err := s.names.Lock(ctx, key)
	if err != nil {
		return nil, fault.FromContext(ctx, "waiting for other work on the sandbox", nil)
	}
	if resp, err := s.repeatDelete(ctx, key, req); resp != nil || err != nil {
		unlock()
		return resp, err
	}
	item, err := s.find(ctx, key)
	if err == nil {
		item, err = s.loadToDelete(ctx, item)
	}
	if err == nil && req.GetUid() != "" && req.GetUid() != item.Sandbox.GetUid() {
		err = otherUID(key, item.Sandbox.GetUid())
	}
	if err != nil {
		unlock()
		return nil, err
	}
	options := deletion.Options{Grace: req.GetGracePeriod(), RequestID: req.GetRequestId(), Traceparent: obs.Traceparent(ctx)}
	resp := &sandboxv1.DeleteSandboxResponse{Sandbox: terminating(item.Sandbox, timestamppb.New(s.config.Clock.Now()))}
	// The deletion continues when the caller leaves: a write that was stopped is not begun again.
	done := make(chan error, 1)
	s.config.Tasks.Go(func(ctx context.Context) {
		defer unlock()
		done <- s.deletions.Delete(obs.WithTraceparent(ctx, options.Traceparent), item, options)
	})
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		return resp, nil
	case <-ctx.Done():
		return nil, fault.FromContext(ctx, "deleting the sandbox", nil)
	}
}

// loadToDelete does the same as load if the API server answers. A deletion needs no more than the outline.
func (s *Server) loadToDelete(ctx context.Context, item store.Item) (store.Item, error) {
	loadCtx, cancel := context.WithTimeout(ctx, s.api.Timeout())
	defer cancel()
	loaded, err := s.load(loadCtx, item)
	switch {
	case err == nil:
		return loaded, nil
	case ctx.Err() == nil && (loadCtx.Err() != nil || fault.ReasonOf(err) == fault.APIUnavailable):
		return item, nil
	}
	return store.Item{}, err
}

// repeatDelete answers a delete call that an earlier leader made durable; nil if none did. The sandbox is shown as it is now,
// and if it is gone, only by its name and uid.
func (s *Server) repeatDelete(ctx context.Context, key store.Key, req *sandboxv1.DeleteSandboxRequest) (*sandboxv1.DeleteSandboxResponse, error) {
	if req.GetRequestId() == "" {
		return nil, nil
	}
	deleted, ok := s.config.Store.DeletedBy(key.Namespace, req.GetRequestId())
	switch {
	case !ok:
		return nil, nil
	case deleted.Key != key, req.GetUid() != "" && req.GetUid() != deleted.UID:
		return nil, idempotency.Reused(req.GetRequestId())
	}
	sandbox := &sandboxv1.Sandbox{Namespace: key.Namespace, Name: key.Name, Uid: deleted.UID}
	if item, ok := s.config.Store.Get(key); ok && item.Sandbox.GetUid() == deleted.UID {
		if item, err := s.loadToDelete(ctx, item); err == nil {
			sandbox = item.Sandbox
		}
	}
	return &sandboxv1.DeleteSandboxResponse{Sandbox: terminating(sandbox, nil)}, nil
}

// terminating returns a sandbox as it is from the moment in which its deletion is accepted.
func terminating(sb *sandboxv1.Sandbox, now *timestamppb.Timestamp) *sandboxv1.Sandbox {
	sb = proto.CloneOf(sb)
	if sb.GetDeleteTime() == nil {
		sb.DeleteTime = now
	}
	if sb.Status == nil {
		sb.Status = &sandboxv1.SandboxStatus{}
	}
	sb.Status.Phase = sandboxv1.Phase_PHASE_TERMINATING
	return sb
}
