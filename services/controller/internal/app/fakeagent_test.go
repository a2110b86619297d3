//go:build integration

package app_test

import (
	"context"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// agent is an AgentService that keeps its word as agent_service.proto has it, without any containers: creates repeat,
// deletes leave a tombstone, failures leave nothing. Its behaviour is scripted by the exported fields, under mu.
type agent struct {
	agentv1.UnimplementedAgentServiceServer

	info    *agentv1.AgentInfo
	address string
	stop    func()
	changed func(*agent, *agentv1.SandboxReport) // tells the allocator
	accepts func(_ *agent, draining bool)        // likewise

	mu         sync.Mutex
	term       int64 // the highest seen
	draining   bool
	old        bool // of a version that cannot be drained
	drains     []*agentv1.DrainRequest
	sticky     []*agentv1.Tombstone              // what the agent has not been told to forget
	reports    map[string]*agentv1.SandboxReport // by container id
	tombstones map[string]bool
	creates    []*agentv1.CreateSandboxRequest
	deletes    []*agentv1.Fence
	// createErr answers creates while it is not nil; gate, while not nil, holds them until it is closed.
	createErr error
	gate      chan struct{}
	// deleteGate holds deletes until it is closed; mute keeps the Registry from hearing of new sandboxes.
	deleteGate chan struct{}
	// deaf holds creates before the first word.
	deaf chan struct{}
	mute bool
}

func idOf(f *agentv1.Fence) string { return f.GetSandboxUid() + "-" + string(rune('0'+f.GetAttempt())) }

func startAgent(t *testing.T, info *agentv1.AgentInfo, registry *allocator) *agent {
	t.Helper()
	a := &agent{info: info, changed: registry.changed, accepts: registry.accepts, reports: map[string]*agentv1.SandboxReport{}, tombstones: map[string]bool{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := grpc.NewServer(
		grpc.UnaryInterceptor(func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			if err := a.guard(ctx); err != nil {
				return nil, rpc.ToStatus(err)
			}
			return handle(ctx, req)
		}),
		grpc.StreamInterceptor(func(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
			if info.FullMethod != agentv1.AgentService_WatchStatus_FullMethodName {
				if err := a.guard(s.Context()); err != nil {
					return rpc.ToStatus(err)
				}
			}
			return handle(srv, s)
		}))
	agentv1.RegisterAgentServiceServer(server, a)
	a.address = listener.Addr().String()
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	a.stop = sync.OnceFunc(func() { server.Stop(); <-done })
	t.Cleanup(a.stop)
	return a
}

// guard refuses what a deposed leader asks.
func (a *agent) guard(ctx context.Context) error {
	term, err := rpc.TermOf(ctx)
	if err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if term < a.term {
		return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term %d is in use", a.term).With(rpc.TermMetadata, strconv.FormatInt(a.term, 10))
	}
	a.term = term
	return nil
}

// Drain takes no new sandboxes, or takes them again.
func (a *agent) Drain(_ context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	if req.GetAgentUid() != a.info.GetPodUid() {
		return nil, rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "another agent is meant"))
	}
	a.mu.Lock()
	if a.old {
		a.mu.Unlock()
		return nil, status.Error(codes.Unimplemented, "method Drain not implemented")
	}
	a.draining = !req.GetResume()
	a.drains = append(a.drains, req)
	n := len(a.reports)
	a.mu.Unlock()
	a.accepts(a, !req.GetResume())
	return &agentv1.DrainResponse{Sandboxes: int32(n)}, nil
}

func (a *agent) CreateSandbox(req *agentv1.CreateSandboxRequest, s grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	f := req.GetRecord().GetFence()
	a.mu.Lock()
	a.creates = append(a.creates, req)
	gate, deaf, refusal := a.gate, a.deaf, a.createErr
	if a.draining && a.reports[idOf(f)] == nil {
		refusal = fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "the agent drains")
	}
	if f.GetAgentUid() != a.info.GetPodUid() || a.tombstones[idOf(f)] {
		refusal = fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "this fence is not in force")
	}
	there := a.reports[idOf(f)]
	if s := there.GetState(); s == agentv1.SandboxState_SANDBOX_STATE_FAILED || s == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		there = nil // a try that is over: it is begun anew
	}
	a.mu.Unlock()
	if refusal != nil {
		return rpc.ToStatus(refusal)
	}
	if deaf != nil {
		select {
		case <-deaf:
		case <-s.Context().Done():
			return rpc.ToStatus(s.Context().Err())
		}
	}
	if there == nil {
		if err := s.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_ADMITTED}); err != nil {
			return err
		}
		if gate != nil {
			select {
			case <-gate:
			case <-s.Context().Done():
				return rpc.ToStatus(s.Context().Err())
			}
		}
		r := &agentv1.SandboxReport{Record: req.GetRecord(), State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: idOf(f),
			Endpoints: []string{"10.0.0.9:8080"}, StartTime: timestamppb.Now(), Persisted: req.GetPersisted(),
			StartPath: sandboxv1.StartPath_START_PATH_SLOT}
		a.mu.Lock()
		if a.tombstones[idOf(f)] {
			a.mu.Unlock()
			return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "deleted meanwhile"))
		}
		a.reports[idOf(f)], there = r, r
		a.mu.Unlock()
		a.tell(r)
	}
	return s.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Report: there})
}

func (a *agent) DeleteSandbox(req *agentv1.DeleteSandboxRequest, s grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	f := req.GetFence()
	a.mu.Lock()
	a.deletes = append(a.deletes, f)
	gate, there := a.deleteGate, a.reports[idOf(f)] != nil
	a.mu.Unlock()
	if f.GetAgentUid() != a.info.GetPodUid() {
		return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "another agent is meant"))
	}
	if there {
		if err := s.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_SIGTERM_SENT}); err != nil {
			return err
		}
	}
	if gate != nil {
		select {
		case <-gate:
		case <-s.Context().Done():
			return rpc.ToStatus(s.Context().Err())
		}
	}
	a.mu.Lock()
	a.tombstones[idOf(f)] = true
	r := a.reports[idOf(f)]
	delete(a.reports, idOf(f))
	a.mu.Unlock()
	if r != nil {
		gone := proto.CloneOf(r)
		gone.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
		a.tell(gone)
	}
	return s.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED})
}

func (a *agent) WatchStatus(_ *agentv1.WatchStatusRequest, s grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	snapshot := &agentv1.AgentSnapshot{Info: a.info, Sandboxes: a.all()}
	a.mu.Lock()
	snapshot.Accepting, snapshot.Tombstones = !a.draining, a.sticky
	if a.draining {
		snapshot.NotAcceptingReason = "Draining"
	}
	a.mu.Unlock()
	if err := s.Send(&agentv1.WatchStatusResponse{Epoch: "1", Sequence: 1, Time: timestamppb.Now(),
		Content: &agentv1.WatchStatusResponse_Snapshot{Snapshot: snapshot}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return nil
}

func (a *agent) all() []*agentv1.SandboxReport {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]*agentv1.SandboxReport, 0, len(a.reports))
	for _, r := range a.reports {
		out = append(out, proto.CloneOf(r))
	}
	return out
}

// put makes a sandbox of this agent as the fast path would have it made, or changes one.
func (a *agent) put(r *agentv1.SandboxReport) {
	a.mu.Lock()
	a.reports[idOf(r.GetRecord().GetFence())] = r
	a.mu.Unlock()
	a.tell(r)
}

// lose takes a container away that nobody deleted.
func (a *agent) lose(id string) {
	a.mu.Lock()
	r := proto.CloneOf(a.reports[id])
	delete(a.reports, id)
	a.mu.Unlock()
	r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
	a.tell(r)
}

func (a *agent) tell(r *agentv1.SandboxReport) {
	a.mu.Lock()
	mute := a.mute
	a.mu.Unlock()
	if !mute {
		a.changed(a, proto.CloneOf(r))
	}
}

func (a *agent) set(change func(*agent)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(a)
}

func (a *agent) createCalls() []*agentv1.CreateSandboxRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.CreateSandboxRequest(nil), a.creates...)
}

func (a *agent) isDraining() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.draining
}

func (a *agent) seenTerm() int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.term
}

func (a *agent) deleteCalls() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.deletes)
}
