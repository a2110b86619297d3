package fakeagent

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/image"
)

// imageBytes is the size of every image.
const imageBytes = 1 << 20

// PullImage implements agentv1.AgentServiceServer. Any image can be pulled, unless OnPull fails it.
func (s *service) PullImage(req *agentv1.PullImageRequest, stream grpc.ServerStreamingServer[agentv1.PullImageResponse]) error {
	name, err := image.Normalize(req.GetImage())
	if err != nil {
		return fault.Field("image", "%v", err)
	}
	send := func(phase string, bytes int64, name string) error {
		return stream.Send(&agentv1.PullImageResponse{Image: name, Progress: &agentv1.PullProgress{
			DownloadedBytes: bytes, TotalBytes: imageBytes, Phase: phase, Elapsed: durationpb.New(0),
		}})
	}
	if err := send("downloading", imageBytes/2, ""); err != nil {
		return err
	}
	if s.OnPull != nil {
		if err := s.OnPull(stream.Context(), name); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.addImage(name)
	s.mu.Unlock()
	return send("done", imageBytes, name)
}

// addImage adds an image to the node. mu is held.
func (s *service) addImage(name string) {
	if !slices.Contains(s.images, name) {
		s.images = append(slices.Clone(s.images), name)
		s.publish(&agentv1.AgentDelta{ImagesAdded: []string{name}})
	}
}

// SetPinnedImages implements agentv1.AgentServiceServer. A pinned image is pulled at once.
func (s *service) SetPinnedImages(ctx context.Context, req *agentv1.SetPinnedImagesRequest) (*agentv1.SetPinnedImagesResponse, error) {
	if err := s.checkAgent(req.GetAgentUid()); err != nil {
		return nil, err
	}
	var pinned []*agentv1.PinnedImage
	var pulled []string
	for _, ref := range req.GetImages() {
		name, err := image.Normalize(ref)
		if err == nil && s.OnPull != nil {
			err = s.OnPull(ctx, name)
		}
		p := &agentv1.PinnedImage{Image: ref, State: agentv1.PinnedImageState_PINNED_IMAGE_STATE_READY}
		if err != nil {
			p.State, p.Message = agentv1.PinnedImageState_PINNED_IMAGE_STATE_FAILED, err.Error()
		} else {
			pulled = append(pulled, name)
		}
		pinned = append(pinned, p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range pulled {
		s.addImage(name)
	}
	s.pinned = pinned
	s.publish(&agentv1.AgentDelta{PinnedImages: &agentv1.PinnedImages{Images: pinned}})
	return &agentv1.SetPinnedImagesResponse{}, nil
}

// PinnedImages returns the pinned images.
func (a *Agent) PinnedImages() []*agentv1.PinnedImage {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pinned
}
