package rpc

import (
	"context"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// AnnounceLeader does nothing: the server's guard (agent/internal/terms) has read the term before it is called.
func (s *Service) AnnounceLeader(context.Context, *agentv1.AnnounceLeaderRequest) (*agentv1.AnnounceLeaderResponse, error) {
	return &agentv1.AnnounceLeaderResponse{}, nil
}
