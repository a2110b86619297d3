package rpc

import (
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// heartbeatInterval is half of what the API promises.
const heartbeatInterval = 500 * time.Millisecond

// deltaDelay is how long a delta that is not urgent waits to be sent together with later ones.
const deltaDelay = 15 * time.Millisecond

// WatchStatus sends the snapshot, every delta, and a heartbeat when nothing else was sent for half a second.
func (s *Service) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	watcher, err := s.config.Status.Watch()
	if err != nil {
		return err
	}
	defer s.config.Status.Unwatch(watcher)
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
	var held []*agentv1.AgentDelta
	for {
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-s.closing:
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent is stopping")
		case delta, ok := <-watcher.Deltas():
			if !ok {
				return watcher.Err()
			}
			held = append(held, delta)
			if deferrable(delta) {
				if len(held) == 1 {
					timer.Reset(deltaDelay)
				}
				continue
			}
		case <-timer.C():
			if len(held) == 0 {
				if err := send(&agentv1.WatchStatusResponse{}); err != nil {
					return err
				}
			}
		}
		for _, delta := range held {
			if err := send(&agentv1.WatchStatusResponse{Content: &agentv1.WatchStatusResponse_Delta{Delta: delta}}); err != nil {
				return err
			}
		}
		held = nil
		timer.Reset(heartbeatInterval)
	}
}

// deferrable reports whether a delta is not urgent: it reports slots, or the progress of a fast create, whose caller receives
// that in its answer. Deferring it moves the watchers' work after the answer, and reduces it.
func deferrable(d *agentv1.AgentDelta) bool {
	rest := &agentv1.AgentDelta{Slots: d.GetSlots(), Sandboxes: d.GetSandboxes()}
	if !proto.Equal(d, rest) {
		return false
	}
	for _, r := range d.GetSandboxes() {
		strong := r.GetRecord().GetConsistencyMode() == sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
		switch r.GetState() {
		case agentv1.SandboxState_SANDBOX_STATE_CREATING:
		case agentv1.SandboxState_SANDBOX_STATE_RUNNING:
			if strong {
				return false
			}
		default:
			return false
		}
	}
	return true
}
