package fastpath

import (
	"context"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// GetSandbox implements sandboxv1.SandboxServiceServer.
func (s *Server) GetSandbox(_ context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	item, ok := s.config.Store.Get(key)
	if !ok {
		return nil, s.missing(key)
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: item.Sandbox}, nil
}
