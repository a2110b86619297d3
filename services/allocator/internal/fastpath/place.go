package fastpath

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/go-logr/logr"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	grpccodes "google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
	"github.com/fast-sandbox/fast-sandbox/internal/obs"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fleet"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/reap"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/registry"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

const (
	// admitTimeout is how long an agent may take to take a sandbox in, which needs no I/O of it; then it counts as lost.
	admitTimeout = 5 * time.Second
	// maxInternal bounds on how many agents a create is tried that makes agents fail internally.
	maxInternal = 3
)

// place has one agent after the other asked until one runs the sandbox, the request itself turns out to be at fault, no
// candidate is left, or ctx ends. After an error nothing is left, unless the error says that the outcome is not known: then
// what may be left is being removed in the background, as long as this process lives.
func (s *Server) place(ctx context.Context, p *plan, record *agentv1.SandboxRecord) (*store.Record, stages, error) {
	var exclude []string
	var open []identity.Fence // tries of which it is not known what became
	var last error
	internal := 0
	fail := func(err error) (*store.Record, stages, error) {
		if slices.ContainsFunc(open, s.reaper.Driving) {
			err = fault.Unsettled(err)
		}
		return nil, nil, err
	}
	for attempt := int64(1); ; {
		if ctx.Err() != nil {
			return fail(errContext(ctx, "creating the sandbox", last))
		}
		var timings stages
		began := s.config.Clock.Now()
		assignment, err := s.reserve(ctx, p, record, attempt, exclude)
		if err != nil {
			if last != nil {
				err = last
			}
			return fail(err)
		}
		timings.add("reserve", s.config.Clock.Since(began))
		fence := assignment.GetFence()
		record := proto.CloneOf(record)
		record.Fence = fence
		report, known, err := s.start(ctx, record, &timings)
		if err == nil && ctx.Err() != nil { // nobody is there to be told of it
			err, known = ctx.Err(), false
		}
		if err == nil {
			return &store.Record{
				Record: record, Report: report, AgentPod: assignment.GetAgentPod(), NodeName: assignment.GetNodeName(),
				AgentAddress: assignment.GetAgentAddress(),
			}, timings, nil
		}
		if known {
			s.config.Fleet.Release(fence)
		} else { // the place stays taken until it is known what became of it
			s.reaper.Drive(reap.Order{Fence: fence})
			if !atTheDoor(err) {
				open = append(open, identity.FenceOf(fence))
				s.leaveOpen(store.Key{Namespace: record.GetNamespace(), Name: record.GetName()}, identity.FenceOf(fence))
			}
		}
		if fault.ReasonOf(err) == fault.LeaderSuperseded {
			// Another process decides now. What became of this attempt is its to find out, too.
			return fail(errDeposed(err))
		}
		// The next container has another id: what this agent is still cleaning up may stand on the next one's node.
		attempt++
		if fault.ReasonOf(err) == fault.Internal {
			internal++
		}
		if ctx.Err() == nil && (!retryable(err) || internal >= maxInternal) {
			return fail(err)
		}
		logr.FromContextOrDiscard(ctx).V(2).Info("trying the next agent", "sandbox", record.GetNamespace()+"/"+record.GetName(),
			"agent", assignment.GetAgentPod(), "err", err.Error())
		exclude = append(exclude, fence.GetAgentUid())
		last = err
	}
}

// leaveOpen notes a try of a create of which it is not known what became, and whose container is being deleted.
func (s *Server) leaveOpen(name store.Key, try identity.Fence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.open, func(_ store.Key, tries []identity.Fence) bool { return !slices.ContainsFunc(tries, s.reaper.Driving) })
	s.open[name] = append(s.open[name], try)
}

// hasOpen tells whether a create under the name may still have left a container.
func (s *Server) hasOpen(name store.Key) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.ContainsFunc(s.open[name], s.reaper.Driving)
}

func (s *Server) reserve(ctx context.Context, p *plan, record *agentv1.SandboxRecord, attempt int64, exclude []string) (*allocatorv1.Assignment, error) {
	_, span := obs.Tracer().Start(ctx, "reserve")
	defer span.End()
	a, err := s.config.Fleet.Reserve(registry.Request{
		Fence: identity.Fence{SandboxUID: record.GetFence().GetSandboxUid(), Attempt: attempt},
		Pool:  registry.Pool{Namespace: record.GetNamespace(), Name: record.GetSpec().GetPool()},
		// Short forms of one reference are one image.
		Image: p.image, Ports: fleet.SharedPorts(record.GetSpec()), Exclude: exclude,
	})
	if err != nil {
		span.SetStatus(codes.Error, err.Error())
		return nil, err
	}
	span.SetAttributes(attribute.String("fast_sandbox.agent", a.GetAgentPod()), attribute.String("fast_sandbox.uid", a.GetFence().GetSandboxUid()))
	return a, nil
}

// errDeposed is the error of a call that met an agent who knows of a later leader: the call is that one's to carry out.
func errDeposed(cause error) error {
	return fault.Wrap(cause, errdefs.ErrUnavailable, fault.NotLeader, "another allocator has taken over").RetryIn(200 * time.Millisecond)
}

// retryable tells whether another agent may do what this one could not: what the agent lacks, as against what the request
// does.
func retryable(err error) bool {
	switch fault.ReasonOf(err) {
	case fault.NoCapacity, fault.PortConflict, fault.AgentUnavailable, fault.RuntimeUnavailable, fault.ImagePullFailed,
		fault.FenceMismatch, fault.Overloaded, fault.Internal, fault.AgentDraining, fault.DeadlineExceeded, fault.Cancelled:
		return true
	}
	return false
}

// start has an agent create and start the sandbox. known tells, with an error, that nothing of it is left there or ever
// will be; otherwise the container must be deleted by its fence.
func (s *Server) start(ctx context.Context, record *agentv1.SandboxRecord, timings *stages) (report *agentv1.SandboxReport, known bool, err error) {
	client, ok := s.config.Agents.Client(record.GetFence().GetAgentUid())
	if !ok {
		return nil, true, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "there is no connection to the agent")
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	admission := s.config.Clock.AfterFunc(admitTimeout, cancel)
	defer admission.Stop()
	began := s.config.Clock.Now()
	stream, err := client.CreateSandbox(ctx, &agentv1.CreateSandboxRequest{Record: record})
	if err != nil {
		return nil, false, rpc.FromStatus(err)
	}
	var inside time.Duration
	var own stages
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil, false, fault.New(errdefs.ErrInternal, fault.Internal, "the agent ended a create without starting the sandbox")
		}
		if err != nil {
			return nil, refusal(err), rpc.FromStatus(err)
		}
		admission.Stop()
		inside += m.GetDuration().AsDuration()
		if name := stageName(m.GetStage()); name != "" {
			own.add(name, m.GetDuration().AsDuration())
		}
		if m.GetStage() == agentv1.CreateStage_CREATE_STAGE_STARTED {
			timings.add("agent", s.config.Clock.Since(began)-inside)
			*timings = append(*timings, own...)
			return m.GetReport(), false, nil
		}
	}
}

// refusal tells whether an error is the agent's own word, which says that nothing is left, as against the connection's.
func refusal(err error) bool {
	st, ok := status.FromError(err)
	if !ok {
		return false
	}
	switch st.Code() {
	case grpccodes.Canceled, grpccodes.DeadlineExceeded, grpccodes.Internal, grpccodes.Unknown:
		return false
	}
	if fault.ReasonOf(rpc.FromStatus(err)) == fault.LeaderSuperseded {
		return false // who leads now may have other plans
	}
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == rpc.Domain {
			return true
		}
	}
	return false
}

// atTheDoor tells that an agent has refused a call for its term, and did nothing of it. A create that a later leader cut off
// in the middle is Canceled.
func atTheDoor(err error) bool {
	return fault.ReasonOf(err) == fault.LeaderSuperseded && errdefs.IsFailedPrecondition(err)
}

func stageName(s agentv1.CreateStage) string {
	switch s {
	case agentv1.CreateStage_CREATE_STAGE_ADMITTED:
		return "admitted"
	case agentv1.CreateStage_CREATE_STAGE_IMAGE:
		return "image"
	case agentv1.CreateStage_CREATE_STAGE_SNAPSHOT:
		return "snapshot"
	case agentv1.CreateStage_CREATE_STAGE_CONTAINER:
		return "container"
	case agentv1.CreateStage_CREATE_STAGE_CLAIM:
		return "claim"
	case agentv1.CreateStage_CREATE_STAGE_TASK:
		return "task"
	case agentv1.CreateStage_CREATE_STAGE_STARTED:
		return "started"
	}
	return ""
}
