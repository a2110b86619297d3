package fastpath

import (
	"context"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// ListSandboxes implements sandboxv1.SandboxServiceServer.
func (s *Server) ListSandboxes(ctx context.Context, req *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	selector, err := store.ParseSelector(req.GetLabelSelector())
	if err != nil {
		return nil, err
	}
	if err := s.awaitFilled(ctx); err != nil {
		return nil, err
	}
	page, next, err := s.config.Store.List(store.Filter{
		Namespace: req.GetNamespace(), Pool: req.GetPool(), Selector: selector, Phases: req.GetPhases(),
	}, int(req.GetPageSize()), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxesResponse{Sandboxes: page, NextPageToken: next}, nil
}
