package rpc

import (
	"context"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// ForgetTombstone drops a tombstone.
func (s *Service) ForgetTombstone(ctx context.Context, req *agentv1.ForgetTombstoneRequest) (*agentv1.ForgetTombstoneResponse, error) {
	if err := s.config.Sandboxes.ForgetTombstone(ctx, req.GetFence()); err != nil {
		return nil, err
	}
	return &agentv1.ForgetTombstoneResponse{}, nil
}
