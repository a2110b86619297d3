package fastpath

import (
	"context"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"

	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// GetSandbox implements sandboxv1.SandboxServiceServer.
func (s *Server) GetSandbox(_ context.Context, req *sandboxv1.GetSandboxRequest) (*sandboxv1.GetSandboxResponse, error) {
	key := store.Key{Namespace: req.GetNamespace(), Name: req.GetName()}
	item, ok := s.store.Get(key)
	if !ok {
		return nil, s.missing(key)
	}
	return &sandboxv1.GetSandboxResponse{Sandbox: item.Sandbox}, nil
}

// find returns a sandbox that is to be changed. One that this process knows nothing of may have been written, or started, by
// a former leader a moment before its end, or by a later one while this process was stopped: that there is none is for the
// API server, for the agents, and for the Lease to say.
func (s *Server) find(ctx context.Context, key store.Key) (store.Item, error) {
	if item, ok := s.store.Get(key); ok {
		return item, nil
	}
	there, err := s.lookup(ctx, key, "")
	switch {
	case ctx.Err() != nil:
		return store.Item{}, errContext(ctx, "asking the API server for the sandbox", err)
	case err != nil:
		return store.Item{}, errAPI(err)
	case there == nil:
		if err := s.await(ctx, key, s.heard); err != nil {
			return store.Item{}, err
		}
		if err := s.await(ctx, key, s.settled); err != nil {
			return store.Item{}, err
		}
		if sure, err := s.config.Lead.Confirm(ctx); err != nil {
			return store.Item{}, errAPI(err)
		} else if !sure {
			return store.Item{}, errDeposed(nil)
		}
		if item, ok := s.store.Get(key); ok {
			return item, nil
		}
		return store.Item{}, s.missing(key)
	}
	s.ResourceSeen(there)
	if item, ok := s.store.Get(key); ok {
		return item, nil
	}
	return store.Item{}, s.missing(key) // it went in between
}

// await waits a moment for a check of a name to be good: an agent that has just started is soon heard, and a container that
// nobody was told of soon gone.
func (s *Server) await(ctx context.Context, key store.Key, check func(store.Key) error) error {
	until := s.config.Clock.Now().Add(shortPatience)
	for {
		err := check(key)
		if err == nil || s.config.Clock.Now().After(until) {
			return err
		}
		if s.pause(ctx, shortPatience/20) != nil {
			return errContext(ctx, "making sure that there is no such sandbox", err)
		}
	}
}

// settled is an error while a create under the name may still have left a container. Who asks for its deletion must not be
// told that there is nothing: should this process die, the next one would find it.
func (s *Server) settled(key store.Key) error {
	if !s.hasOpen(key) {
		return nil
	}
	return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "what a create of sandbox %s may have left is still being deleted", key).
		RetryIn(time.Second)
}

// heard is an error if an agent that may have the sandbox has not been heard since this process leads.
func (s *Server) heard(key store.Key) error {
	for _, a := range s.config.Fleet.Agents(key.Namespace, "") {
		if !s.config.Announced(a.GetInfo().GetPodUid()) && !s.config.Agents.Gone(a.GetInfo().GetPodUid()) {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable,
				"sandbox %s is not known, and agent %s, which may have it, has not been heard yet", key, a.GetInfo().GetPodName()).RetryIn(time.Second)
		}
	}
	return nil
}

// ListSandboxes implements sandboxv1.SandboxServiceServer.
func (s *Server) ListSandboxes(_ context.Context, req *sandboxv1.ListSandboxesRequest) (*sandboxv1.ListSandboxesResponse, error) {
	selector, err := store.ParseSelector(req.GetLabelSelector())
	if err != nil {
		return nil, err
	}
	if !s.config.Pools.Synced() { // half a list would be taken for the whole
		return nil, errAPI(nil)
	}
	page, next, err := s.store.List(store.Filter{
		Namespace: req.GetNamespace(), Pool: req.GetPool(), Selector: selector, Phases: req.GetPhases(),
	}, int(req.GetPageSize()), req.GetPageToken())
	if err != nil {
		return nil, err
	}
	return &sandboxv1.ListSandboxesResponse{Sandboxes: page, NextPageToken: next}, nil
}

// WatchSandboxes implements sandboxv1.SandboxServiceServer.
func (s *Server) WatchSandboxes(req *sandboxv1.WatchSandboxesRequest, stream grpc.ServerStreamingServer[sandboxv1.WatchSandboxesResponse]) error {
	selector, err := store.ParseSelector(req.GetLabelSelector())
	if err != nil {
		return err
	}
	if !s.config.Pools.Synced() {
		return errAPI(nil)
	}
	initial, watch := s.store.Watch(store.Filter{
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
				return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "the watch was read too slowly; watch anew")
			}
			if err := stream.Send(event); err != nil {
				return err
			}
		}
	}
}
