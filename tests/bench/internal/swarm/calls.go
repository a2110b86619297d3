package swarm

import (
	"context"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
)

// CreateSandbox implements agentv1.AgentServiceServer: the sandbox runs at once, as if it had claimed a slot.
func (s *Swarm) CreateSandbox(req *agentv1.CreateSandboxRequest, stream grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	a, err := s.called(stream.Context())
	if err != nil {
		return err
	}
	record := req.GetRecord()
	if record.GetFence().GetAgentUid() != a.info.GetPodUid() {
		return status.Error(codes.FailedPrecondition, "the fence names another agent")
	}
	a.put(&agentv1.SandboxReport{Record: record, State: agentv1.SandboxState_SANDBOX_STATE_CREATING, Persisted: req.GetPersisted()})
	if err := stream.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_ADMITTED}); err != nil {
		return err
	}
	report := Running(record, a.info.GetPodIp(), req.GetPersisted())
	a.put(report)
	return stream.Send(&agentv1.CreateSandboxResponse{
		Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Duration: durationpb.New(time.Microsecond), Report: report,
	})
}

// Running returns the report of a running sandbox.
func Running(record *agentv1.SandboxRecord, ip string, persisted bool) *agentv1.SandboxReport {
	f := record.GetFence()
	r := &agentv1.SandboxReport{
		Record: record, State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, Persisted: persisted, StartTime: timestamppb.Now(),
		ContainerId: f.GetSandboxUid() + "-" + strconv.FormatInt(f.GetAttempt(), 10), StartPath: sandboxv1.StartPath_START_PATH_SLOT,
	}
	for _, p := range record.GetSpec().GetPorts() {
		r.Endpoints = append(r.Endpoints, ip+":"+strconv.Itoa(int(p)))
	}
	return r
}

// DeleteSandbox implements agentv1.AgentServiceServer: the sandbox is removed at once.
func (s *Swarm) DeleteSandbox(req *agentv1.DeleteSandboxRequest, stream grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	a, err := s.called(stream.Context())
	if err != nil {
		return err
	}
	if t := req.GetTombstone(); t != nil {
		a.mu.Lock()
		a.tombstones[uidOf(t.GetFence())] = t
		a.notify(&agentv1.AgentDelta{TombstonesAdded: []*agentv1.Tombstone{t}})
		a.mu.Unlock()
	}
	a.change(req.GetFence(), func(r *agentv1.SandboxReport) { r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED })
	if err := stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT}); err != nil {
		return err
	}
	return stream.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED})
}

// MarkPersisted implements agentv1.AgentServiceServer.
func (s *Swarm) MarkPersisted(ctx context.Context, req *agentv1.MarkPersistedRequest) (*agentv1.MarkPersistedResponse, error) {
	a, err := s.called(ctx)
	if err != nil {
		return nil, err
	}
	if !a.change(req.GetFence(), func(r *agentv1.SandboxReport) { r.Persisted = true }) {
		return nil, status.Error(codes.NotFound, "the sandbox does not exist")
	}
	return &agentv1.MarkPersistedResponse{}, nil
}

// ForgetTombstone implements agentv1.AgentServiceServer.
func (s *Swarm) ForgetTombstone(ctx context.Context, req *agentv1.ForgetTombstoneRequest) (*agentv1.ForgetTombstoneResponse, error) {
	a, err := s.called(ctx)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, ok := a.tombstones[uidOf(req.GetFence())]; ok {
		delete(a.tombstones, uidOf(req.GetFence()))
		a.notify(&agentv1.AgentDelta{TombstonesRemoved: []*agentv1.Fence{req.GetFence()}})
	}
	return &agentv1.ForgetTombstoneResponse{}, nil
}

// AnnounceLeader implements agentv1.AgentServiceServer.
func (s *Swarm) AnnounceLeader(context.Context, *agentv1.AnnounceLeaderRequest) (*agentv1.AnnounceLeaderResponse, error) {
	return &agentv1.AnnounceLeaderResponse{}, nil
}
