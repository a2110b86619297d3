//go:build integration

package app_test

import (
	"context"
	"net"
	"strconv"
	"sync"
	"testing"
	"time"

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

// agent implements AgentService without containers: creates are idempotent, a deleted fence cannot be created again, a failed
// create leaves nothing. The fields below mu script it.
type agent struct {
	agentv1.UnimplementedAgentServiceServer

	info      *agentv1.AgentInfo
	address   string
	stop      func()
	changed   func(*agent, *agentv1.SandboxReport) // notifies the allocator
	accepting func(_ *agent, draining bool)        // likewise

	mu          sync.Mutex
	term        int64 // the highest seen
	draining    bool
	cannotDrain bool // a version without Drain
	drains      []*agentv1.DrainRequest
	kept        []*agentv1.Tombstone              // tombstones that were not forgotten
	reports     map[string]*agentv1.SandboxReport // by container id
	tombstones  map[string]bool
	creates     []*agentv1.CreateSandboxRequest
	deletes     []*agentv1.DeleteSandboxRequest
	pins        []*agentv1.SetPinnedImagesRequest
	// pinErr, while it is not nil, is the result of SetPinnedImages.
	pinErr error
	// createErr, while it is not nil, is the result of creates; gate, while it is not nil, blocks them until it is closed.
	createErr error
	gate      chan struct{}
	// deleteGate blocks deletes until it is closed; unreported keeps new sandboxes from the Registry.
	deleteGate chan struct{}
	// answerGate blocks creates before their first response.
	answerGate chan struct{}
	unreported bool
}

func idOf(f *agentv1.Fence) string { return f.GetSandboxUid() + "-" + string(rune('0'+f.GetAttempt())) }

func startAgent(t *testing.T, info *agentv1.AgentInfo, registry *allocator) *agent {
	t.Helper()
	a := &agent{info: info, changed: registry.changed, accepting: registry.setAccepting, reports: map[string]*agentv1.SandboxReport{}, tombstones: map[string]bool{}}
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

// guard refuses calls with a lower term than the highest one so far.
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

// Drain implements agentv1.AgentServiceServer.
func (a *agent) Drain(_ context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	if req.GetAgentUid() != a.info.GetPodUid() {
		return nil, rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the fence names another agent"))
	}
	a.mu.Lock()
	if a.cannotDrain {
		a.mu.Unlock()
		return nil, status.Error(codes.Unimplemented, "method Drain not implemented")
	}
	a.draining = !req.GetResume()
	a.drains = append(a.drains, req)
	n := len(a.reports)
	a.mu.Unlock()
	a.accepting(a, !req.GetResume())
	return &agentv1.DrainResponse{Sandboxes: int32(n)}, nil
}

func (a *agent) CreateSandbox(req *agentv1.CreateSandboxRequest, s grpc.ServerStreamingServer[agentv1.CreateSandboxResponse]) error {
	f := req.GetRecord().GetFence()
	a.mu.Lock()
	a.creates = append(a.creates, req)
	gate, answerGate, refusal := a.gate, a.answerGate, a.createErr
	if a.draining && a.reports[idOf(f)] == nil {
		refusal = fault.New(errdefs.ErrUnavailable, fault.AgentDraining, "the agent is draining")
	}
	if f.GetAgentUid() != a.info.GetPodUid() || a.tombstones[idOf(f)] {
		refusal = fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the fence was deleted")
	}
	there := a.reports[idOf(f)]
	if s := there.GetState(); s == agentv1.SandboxState_SANDBOX_STATE_FAILED || s == agentv1.SandboxState_SANDBOX_STATE_TERMINATED {
		there = nil // an earlier create that has ended
	}
	a.mu.Unlock()
	if refusal != nil {
		return rpc.ToStatus(refusal)
	}
	if answerGate != nil {
		select {
		case <-answerGate:
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
			return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the fence was deleted"))
		}
		a.reports[idOf(f)], there = r, r
		a.mu.Unlock()
		a.report(r)
	}
	return s.Send(&agentv1.CreateSandboxResponse{Stage: agentv1.CreateStage_CREATE_STAGE_STARTED, Report: there})
}

func (a *agent) DeleteSandbox(req *agentv1.DeleteSandboxRequest, s grpc.ServerStreamingServer[agentv1.DeleteSandboxResponse]) error {
	f := req.GetFence()
	a.mu.Lock()
	a.deletes = append(a.deletes, req)
	gate, there := a.deleteGate, a.reports[idOf(f)] != nil
	a.mu.Unlock()
	if f.GetAgentUid() != a.info.GetPodUid() {
		return rpc.ToStatus(fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the fence names another agent"))
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
		a.report(gone)
	}
	return s.Send(&agentv1.DeleteSandboxResponse{Stage: agentv1.DeleteStage_DELETE_STAGE_REMOVED})
}

// SetPinnedImages implements agentv1.AgentServiceServer.
func (a *agent) SetPinnedImages(_ context.Context, req *agentv1.SetPinnedImagesRequest) (*agentv1.SetPinnedImagesResponse, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.pins = append(a.pins, req)
	if a.pinErr != nil {
		return nil, rpc.ToStatus(a.pinErr)
	}
	return &agentv1.SetPinnedImagesResponse{}, nil
}

func (a *agent) WatchStatus(_ *agentv1.WatchStatusRequest, s grpc.ServerStreamingServer[agentv1.WatchStatusResponse]) error {
	snapshot := &agentv1.AgentSnapshot{Info: a.info, Sandboxes: a.all()}
	a.mu.Lock()
	snapshot.Accepting, snapshot.Tombstones = !a.draining, a.kept
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

// put adds a sandbox, as a create on the fast path does, or changes one.
func (a *agent) put(r *agentv1.SandboxReport) {
	a.mu.Lock()
	a.reports[idOf(r.GetRecord().GetFence())] = r
	a.mu.Unlock()
	a.report(r)
}

// removeContainer removes a container that was not deleted.
func (a *agent) removeContainer(id string) {
	a.mu.Lock()
	r := proto.CloneOf(a.reports[id])
	delete(a.reports, id)
	a.mu.Unlock()
	r.State = agentv1.SandboxState_SANDBOX_STATE_TERMINATED
	a.report(r)
}

func (a *agent) report(r *agentv1.SandboxReport) {
	a.mu.Lock()
	unreported := a.unreported
	a.mu.Unlock()
	if !unreported {
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

// gracePeriods returns the grace periods of all delete calls; -1 if a call had none.
func (a *agent) gracePeriods() []time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	var out []time.Duration
	for _, d := range a.deletes {
		if d.GetGracePeriod() == nil {
			out = append(out, -1)
			continue
		}
		out = append(out, d.GetGracePeriod().AsDuration())
	}
	return out
}

func (a *agent) pinCalls() []*agentv1.SetPinnedImagesRequest {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]*agentv1.SetPinnedImagesRequest(nil), a.pins...)
}

func (a *agent) deleteCalls() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.deletes)
}
