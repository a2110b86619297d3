package fakeagent

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// DeleteSandbox implements agentv1.AgentServiceServer.
func (a *Agent) DeleteSandbox(req *agentv1.DeleteSandboxRequest, stream grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	if err := a.fence(req.GetFence()); err != nil {
		return err
	}
	if t := req.GetTombstone(); t != nil && !proto.Equal(t.GetFence(), req.GetFence()) {
		return fault.Field("tombstone.fence", "is not the request's")
	}
	a.mu.Lock()
	a.deleteRequests = append(a.deleteRequests, req)
	a.mu.Unlock()
	if a.OnDelete != nil {
		if err := a.OnDelete(stream.Context(), req.GetFence()); err != nil {
			return err
		}
	}
	k := keyOf(req.GetFence())
	a.mu.Lock()
	a.deletes = append(a.deletes, req.GetFence())
	a.tombs[k] = true
	if t := req.GetTombstone(); t != nil && a.tombstones[k] == nil {
		a.tombstones[k] = t
		a.tell(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{t}})
	} else if kept := a.tombstones[k]; kept != nil && req.GetGracePeriod() != nil {
		kept = proto.CloneOf(kept)
		kept.GracePeriod = req.GetGracePeriod()
		a.tombstones[k] = kept
	}
	a.mu.Unlock()
	if err := stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT}); err != nil {
		return err
	}
	if a.OnRemove != nil {
		a.OnRemove(req.GetFence())
	}
	a.drop(k)
	return stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED})
}

// DeleteRequests returns the requests for deletes that had a valid fence, in their order.
func (a *Agent) DeleteRequests() []*agentv1.DeleteSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.DeleteSandboxRequest(nil), a.deleteRequests...)
}

// ForgetTombstone implements agentv1.AgentServiceServer.
func (a *Agent) ForgetTombstone(_ context.Context, req *agentv1.ForgetTombstoneRequest) (*agentv1.ForgetTombstoneResponse, error) {
	if err := a.fence(req.GetFence()); err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if k := keyOf(req.GetFence()); a.tombstones[k] != nil {
		delete(a.tombstones, k)
		a.forgotten++
		a.tell(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{req.GetFence()}})
	}
	return &agentv1.ForgetTombstoneResponse{}, nil
}

// Bury makes the agent have a tombstone, as if a former allocator had set it.
func (a *Agent) Bury(t *agentv1.Tombstone) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.tombstones[keyOf(t.GetFence())] = t
	a.tell(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{t}})
}

// Tombstones returns those that were not forgotten.
func (a *Agent) Tombstones() []*agentv1.Tombstone {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []*agentv1.Tombstone
	for _, t := range a.tombstones {
		out = append(out, t)
	}
	return out
}

// Forgotten is how many tombstones were.
func (a *Agent) Forgotten() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.forgotten
}
