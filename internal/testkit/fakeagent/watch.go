package fakeagent

import (
	"maps"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// watchBuffer is the number of changes that a watcher may lag behind before the agent waits for it.
const watchBuffer = 4096

// WatchStatus implements agentv1.AgentServiceServer.
func (s *service) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	snapshot, deltas, skip := s.watch()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, deltas)
	}()
	ticker := time.NewTicker(s.Heartbeat)
	defer ticker.Stop()
	m := &agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Snapshot{Snapshot: snapshot}}
	for sequence := int64(1); ; sequence++ {
		if skip && sequence == 2 {
			sequence++
		}
		m.Epoch, m.Sequence, m.Time = "1", sequence, timestamppb.Now()
		if err := stream.Send(m); err != nil {
			return err
		}
		m = &agentv1.WatchStatusResponse{}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case d := <-deltas:
			m.Content = &agentv1.WatchStatusResponse_Delta{Delta: d}
		case <-ticker.C:
		}
	}
}

// watch returns the whole state and the channel of every later change.
func (s *service) watch() (*agentv1.AgentSnapshot, chan *agentv1.AgentDelta, bool) {
	deltas := make(chan *agentv1.AgentDelta, watchBuffer)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watches++
	skip := s.Skip
	s.Skip = false
	snapshot := &agentv1.AgentSnapshot{
		Info: s.info, Images: s.images, Accepting: s.accepting, Slots: s.slots, PinnedImages: s.pinned,
		Tombstones: slices.Collect(maps.Values(s.tombstones)), Sandboxes: slices.Collect(maps.Values(s.sandboxes)),
	}
	if !s.accepting {
		snapshot.NotAcceptingReason = "Draining"
	}
	s.watchers[deltas] = struct{}{}
	return snapshot, deltas, skip
}

// Watches returns the number of status streams that were opened.
func (a *Agent) Watches() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.watches
}

// StreamLogs implements agentv1.AgentServiceServer: the output of a sandbox is its container's id.
func (s *service) StreamLogs(req *agentv1.StreamLogsRequest, stream grpc.ServerStreamingServer[agentv1.StreamLogsResponse]) error {
	s.mu.Lock()
	r, ok := s.sandboxes[identity.FenceOf(req.GetFence())]
	s.mu.Unlock()
	if !ok {
		return errNotFound(req.GetFence())
	}
	return stream.Send(&agentv1.StreamLogsResponse{Data: []byte(r.GetContainerId())})
}
