package fastpath

import (
	"context"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// GetSandbox implements sandboxv1.SandboxServiceServer.
func (s *Server) GetSandbox(ctx context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	item, err := s.get(ctx, store.Key{Namespace: req.GetNamespace(), Name: req.GetName()})
	if err != nil {
		return nil, err
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: item.Sandbox}, nil
}
