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
func (a *Agent) WatchStatus(_ *agentv1.WatchStatusRequest, stream grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	snapshot, deltas, skip := a.watch()
	defer func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		delete(a.watchers, deltas)
	}()
	ticker := time.NewTicker(a.Heartbeat)
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
func (a *Agent) watch() (*agentv1.AgentSnapshot, chan *agentv1.AgentDelta, bool) {
	deltas := make(chan *agentv1.AgentDelta, watchBuffer)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.watches++
	skip := a.Skip
	a.Skip = false
	snapshot := &agentv1.AgentSnapshot{
		Info: a.info, Images: a.images, Accepting: a.accepting, Slots: a.slots, PinnedImages: a.pinned,
		Tombstones: slices.Collect(maps.Values(a.tombstones)), Sandboxes: slices.Collect(maps.Values(a.sandboxes)),
	}
	if !a.accepting {
		snapshot.NotAcceptingReason = "Draining"
	}
	a.watchers[deltas] = struct{}{}
	return snapshot, deltas, skip
}

// Watches returns the number of status streams that were opened.
func (a *Agent) Watches() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.watches
}

// StreamLogs implements agentv1.AgentServiceServer: the output of a sandbox is its container's id.
func (a *Agent) StreamLogs(req *agentv1.StreamLogsRequest, stream grpc.ServerStreamingServer[agentv1.StreamLogsResponse]) error {
	a.mu.Lock()
	r, ok := a.sandboxes[identity.FenceOf(req.GetFence())]
	a.mu.Unlock()
	if !ok {
		return errNotFound(req.GetFence())
	}
	return stream.Send(&agentv1.StreamLogsResponse{Data: []byte(r.GetContainerId())})
}
