package rpc

import (
	"context"
	"math"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// Drain makes the agent accept no new sandboxes, or accept them again.
func (s *Service) Drain(ctx context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	left, err := s.config.Sandboxes.Drain(ctx, req.GetAgentUid(), req.GetResume())
	if err != nil {
		return nil, err
	}
	return &agentv1.DrainResponse{Sandboxes: int32(min(left, math.MaxInt32))}, nil
}
