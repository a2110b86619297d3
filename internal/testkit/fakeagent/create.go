package fakeagent

import (
	"fmt"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// CreateSandbox implements agentv1.AgentServiceServer.
func (s *service) CreateSandbox(req *agentv1.CreateSandboxRequest, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	record := req.GetRecord()
	fence := identity.FenceOf(record.GetFence())
	if err := s.checkAgent(fence.AgentUID); err != nil {
		return err
	}
	if err := s.checkOwn(record.GetNamespace(), record.GetSpec().GetPool()); err != nil {
		return err
	}
	existing, err := s.admit(req)
	if err != nil {
		return err
	}
	if existing != nil {
		return stream.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Report: existing})
	}
	if err := s.launch(record, stream); err != nil {
		s.remove(fence)
		return err
	}
	stage, path := s.claim()
	if err := stream.Send(&agentv1.CreateSandboxResponse{Stage: stage, Duration: durationpb.New(2 * time.Millisecond)}); err != nil {
		s.remove(fence)
		return err
	}
	report := s.start(fence, path)
	if report == nil {
		return errTerminating(fence)
	}
	if s.OnStarted != nil {
		if err := s.OnStarted(stream.Context(), record); err != nil {
			return err
		}
	}
	return stream.Send(&agentv1.CreateSandboxResponse{
		Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Duration: durationpb.New(time.Millisecond), Report: report,
	})
}

// admit decides a create. It returns the report of a sandbox that runs already, or adds one in the state CREATING.
func (s *service) admit(req *agentv1.CreateSandboxRequest) (existing *agentv1.SandboxReport, err error) {
	record := req.GetRecord()
	fence := identity.FenceOf(record.GetFence())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.creates++
	if r := s.sandboxes[fence]; r.GetState() == agentv1.SandboxState_SANDBOX_STATE_FAILED {
		delete(s.sandboxes, fence) // a create that has failed is removed before it is repeated
	} else if r != nil && !s.deleted[fence] {
		if !sameRecord(r.GetRecord(), record) {
			return nil, fault.New(errdefs.ErrAlreadyExists, fault.SandboxExists, "attempt %d of sandbox %s exists with another record", fence.Attempt, fence.SandboxUID)
		}
		if r.GetState() != agentv1.SandboxState_SANDBOX_STATE_CREATING {
			return r, nil
		}
	}
	inUse := 0
	for other, r := range s.sandboxes {
		if other.SandboxUID == fence.SandboxUID && other.Attempt > fence.Attempt {
			return nil, fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "attempt %d of sandbox %s is in force", other.Attempt, other.SandboxUID)
		}
		if r.GetState() != agentv1.SandboxState_SANDBOX_STATE_STOPPED {
			inUse++
		}
	}
	switch {
	case s.deleted[fence]:
		return nil, errTerminating(fence)
	case s.deletedLater(fence):
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "a later attempt of sandbox %s was deleted", fence.SandboxUID)
	case !s.accepting:
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "the agent is draining")
	case inUse >= int(s.info.GetCapacity()):
		return nil, fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "all %d capacity units of the agent are in use", s.info.GetCapacity())
	}
	s.setReport(&agentv1.SandboxReport{
		Record: record, State: agentv1.SandboxState_SANDBOX_STATE_CREATING, ContainerId: fence.ContainerID(), Persisted: req.GetPersisted(),
	})
	return nil, nil
}

// sameRecord compares records; a repeated call may belong to another trace.
func sameRecord(a, b *agentv1.SandboxRecord) bool {
	b = proto.CloneOf(b)
	b.Traceparent = a.GetTraceparent()
	return proto.Equal(a, b)
}

// deletedLater reports whether a later attempt of the sandbox was deleted. mu is held.
func (s *service) deletedLater(fence identity.Fence) bool {
	for other := range s.deleted {
		if other.SandboxUID == fence.SandboxUID && other.Attempt > fence.Attempt {
			return true
		}
	}
	return false
}

func errTerminating(fence identity.Fence) error {
	return fault.New(errdefs.ErrAborted, fault.SandboxTerminating, "attempt %d of sandbox %s is being deleted", fence.Attempt, fence.SandboxUID)
}

// launch is the part of a create between admission and the start of the process.
func (s *service) launch(record *agentv1.SandboxRecord, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	if err := stream.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_ADMITTED}); err != nil {
		return err
	}
	if s.OnCreate != nil {
		if err := s.OnCreate(stream.Context(), record); err != nil {
			return err
		}
	}
	return stream.Context().Err()
}

// claim takes a slot if one is free, and returns the stage and path of the create.
func (s *service) claim() (agentv1.CreateStage, sandboxv1.StartPath) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.slots.GetFree() == 0 {
		return agentv1.CreateStage_CREATE_STAGE_TASK, sandboxv1.StartPath_START_PATH_COLD
	}
	s.slots = proto.CloneOf(s.slots)
	s.slots.Free--
	s.publish(&agentv1.AgentDelta{Slots: s.slots})
	return agentv1.CreateStage_CREATE_STAGE_CLAIM, sandboxv1.StartPath_START_PATH_SLOT
}

// start moves a sandbox to RUNNING and returns its report; nil if it was deleted meanwhile.
func (s *service) start(fence identity.Fence, path sandboxv1.StartPath) *agentv1.SandboxReport {
	s.mu.Lock()
	defer s.mu.Unlock()
	report := s.sandboxes[fence]
	if s.deleted[fence] || report == nil {
		return nil
	}
	report = proto.CloneOf(report)
	report.State = agentv1.SandboxState_SANDBOX_STATE_RUNNING
	report.StartTime, report.StartPath = timestamppb.Now(), path
	for _, p := range report.GetRecord().GetSpec().GetPorts() {
		report.Endpoints = append(report.Endpoints, fmt.Sprintf("%s:%d", s.info.GetPodIp(), p))
	}
	s.setReport(report)
	return report
}

// Creates returns the number of CreateSandbox calls.
func (a *Agent) Creates() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.creates
}

// Deletes returns the fences of the deletions that were not failed by OnDelete.
func (a *Agent) Deletes() []*agentv1.Fence {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.deletes)
}
