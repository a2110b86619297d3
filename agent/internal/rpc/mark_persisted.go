package rpc

import (
	"context"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// MarkPersisted records that a sandbox's custom resource is written.
func (s *Service) MarkPersisted(ctx context.Context, req *agentv1.MarkPersistedRequest) (*agentv1.MarkPersistedResponse, error) {
	if err := s.config.Sandboxes.MarkPersisted(ctx, req.GetFence()); err != nil {
		return nil, err
	}
	return &agentv1.MarkPersistedResponse{}, nil
}
