package rpc

import (
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// heartbeatInterval is half of what the API promises.
const heartbeatInterval = 500 * time.Millisecond

// WatchStatus sends the snapshot, every delta, and a heartbeat when nothing else was sent for half a second.
func (s *Service) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	watcher, err := s.config.Sandboxes.Watch()
	if err != nil {
		return err
	}
	defer s.config.Sandboxes.Unwatch(watcher)
	sequence := int64(0)
	send := func(m *agentv1.WatchStatusResponse) error {
		sequence++
		m.Epoch, m.Sequence, m.Time = s.epoch, sequence, timestamppb.New(s.config.Clock.Now())
		return stream.Send(m)
	}
	if err := send(&agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Snapshot{Snapshot: watcher.Snapshot}}); err != nil {
		return err
	}
	timer := s.config.Clock.NewTimer(heartbeatInterval)
	defer timer.Stop()
	for {
		var m *agentv1.WatchStatusResponse
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.closing:
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
		case delta, ok := <-watcher.Deltas():
			if !ok {
				return watcher.Err()
			}
			m = &agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Delta{Delta: delta}}
		case <-timer.C():
			m = &agentv1.WatchStatusResponse{}
		}
		if err := send(m); err != nil {
			return err
		}
		timer.Reset(heartbeatInterval)
	}
}
