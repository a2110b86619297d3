package fakeagent

import (
	"context"
	"maps"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// DeleteSandbox implements agentv1.AgentServiceServer.
func (s *service) DeleteSandbox(req *agentv1.DeleteSandboxRequest, stream grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	fence := identity.FenceOf(req.GetFence())
	if err := s.checkAgent(fence.AgentUID); err != nil {
		return err
	}
	if t := req.GetTombstone(); t != nil && !proto.Equal(t.GetFence(), req.GetFence()) {
		return fault.Field("tombstone.fence", "is not the request's")
	}
	if t := req.GetTombstone(); t != nil {
		if err := s.checkOwn(t.GetNamespace(), s.info.GetPool()); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.deleteRequests = append(s.deleteRequests, req)
	s.mu.Unlock()
	if s.OnDelete != nil {
		if err := s.OnDelete(stream.Context(), req.GetFence()); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.deletes = append(s.deletes, req.GetFence())
	s.deleted[fence] = true
	if t := req.GetTombstone(); t != nil && s.tombstones[fence] == nil {
		s.tombstones[fence] = t
		s.publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{t}})
	} else if kept := s.tombstones[fence]; kept != nil && req.GetGracePeriod() != nil {
		kept = proto.CloneOf(kept)
		kept.GracePeriod = req.GetGracePeriod()
		s.tombstones[fence] = kept
	}
	s.mu.Unlock()
	if err := stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT}); err != nil {
		return err
	}
	if s.OnRemove != nil {
		s.OnRemove(req.GetFence())
	}
	s.remove(fence)
	return stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED})
}

// DeleteRequests returns the delete requests with a valid fence, in their order.
func (a *Agent) DeleteRequests() []*agentv1.DeleteSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.deleteRequests)
}

// ForgetTombstone implements agentv1.AgentServiceServer.
func (s *service) ForgetTombstone(_ context.Context, req *agentv1.ForgetTombstoneRequest) (*agentv1.ForgetTombstoneResponse, error) {
	fence := identity.FenceOf(req.GetFence())
	if err := s.checkAgent(fence.AgentUID); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tombstones[fence] != nil {
		delete(s.tombstones, fence)
		s.forgotten++
		s.publish(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{req.GetFence()}})
	}
	return &agentv1.ForgetTombstoneResponse{}, nil
}

// AddTombstone adds a tombstone, as if a former allocator had deleted the sandbox.
func (a *Agent) AddTombstone(t *agentv1.Tombstone) {
	a.mu.Lock()
	defer a.mu.Unlock()
	fence := identity.FenceOf(t.GetFence())
	a.tombstones[fence], a.deleted[fence] = t, true
	a.publish(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{t}})
}

// Tombstones returns the tombstones that were not forgotten, in no order.
func (a *Agent) Tombstones() []*agentv1.Tombstone {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Collect(maps.Values(a.tombstones))
}

// Forgotten returns the number of tombstones that were forgotten.
func (a *Agent) Forgotten() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.forgotten
}
