package rpc

import (
	"context"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
)

// SetPinnedImages replaces the list of images that the agent pulls ahead and keeps. It does not wait for pulls.
func (s *Service) SetPinnedImages(_ context.Context, req *agentv1.SetPinnedImagesRequest) (*agentv1.SetPinnedImagesResponse, error) {
	if err := s.config.Sandboxes.CheckAgent(req.GetAgentUid()); err != nil {
		return nil, err
	}
	if err := s.config.Pinned.Set(req.GetImages()); err != nil {
		return nil, err
	}
	return &agentv1.SetPinnedImagesResponse{}, nil
}
