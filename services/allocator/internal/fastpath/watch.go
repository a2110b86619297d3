package fastpath

import (
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// WatchSandboxes implements sandboxv1.SandboxServiceServer.
func (s *Server) WatchSandboxes(req *sandboxv1.WatchSandboxesRequest, stream grpc.ServerStreamingServer[sandboxv1.WatchSandboxesResponse]) error {
	selector, err := store.ParseSelector(req.GetLabelSelector())
	if err != nil {
		return err
	}
	if err := s.awaitFilled(stream.Context()); err != nil {
		return err
	}
	initial, watch := s.config.Store.Watch(store.Filter{
		Namespace: req.GetNamespace(), Name: req.GetName(), Pool: req.GetPool(), Selector: selector, Phases: req.GetPhases(),
	})
	defer watch.Close()
	for _, sb := range initial {
		if err := stream.Send(&sandboxv1.WatchSandboxesResponse{Type: sandboxv1.WatchSandboxesResponse_TYPE_ADDED, Sandbox: sb}); err != nil {
			return err
		}
	}
	if err := stream.Send(&sandboxv1.WatchSandboxesResponse{Type: sandboxv1.WatchSandboxesResponse_TYPE_SYNCED}); err != nil {
		return err
	}
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case event, ok := <-watch.Events():
			if !ok {
				return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the watch was read too slowly; begin a new one")
			}
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}
