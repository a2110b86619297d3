package fastpath

import (
	"context"
	"net"
	"strconv"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	allocatorv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/allocator/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/store"
)

// CreateLogTicket implements sandboxv1.SandboxServiceServer.
func (s *Server) CreateLogTicket(ctx context.Context, req *sandboxv1.CreateLogTicketRequest) (*sandboxv1.CreateLogTicketResponse, error) {
	at, err := s.Locate(ctx, req.GetNamespace(), req.GetName())
	if err != nil {
		return nil, err
	}
	fence := at.GetFence()
	_, text, err := net.SplitHostPort(at.GetAgentAddress())
	if err != nil {
		return nil, err
	}
	port, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		return nil, err
	}
	caller, _ := auth.CallerOf(ctx)
	ticket := auth.Ticket{
		User: caller.User, Method: agentv1.AgentService_StreamLogs_FullMethodName,
		AgentUID: fence.GetAgentUid(), SandboxUID: fence.GetSandboxUid(), Attempt: fence.GetAttempt(), Expires: s.config.Clock.Now().Add(auth.TicketLife),
	}
	signed, err := s.config.Sign(ticket)
	if err != nil {
		return nil, err
	}
	return &sandboxv1.CreateLogTicketResponse{
		Ticket: signed, ExpireTime: timestamppb.New(ticket.Expires), SandboxUid: ticket.SandboxUID, Attempt: ticket.Attempt, AgentUid: ticket.AgentUID,
		AgentPod: at.GetAgentPod(), NodeName: at.GetNodeName(), Port: int32(port),
	}, nil
}

// Locate returns where a sandbox runs, once it was created.
func (s *Server) Locate(ctx context.Context, namespace, name string) (*allocatorv1.Assignment, error) {
	fence, err := s.container(ctx, store.Key{Namespace: namespace, Name: name})
	if err != nil {
		return nil, err
	}
	agent, ok := s.config.Fleet.Agent(fence.GetAgentUid())
	if !ok {
		return nil, fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "the agent of sandbox %s/%s is gone", namespace, name)
	}
	return &allocatorv1.Assignment{
		Fence: fence, AgentPod: agent.GetInfo().GetPodName(), NodeName: agent.GetInfo().GetNodeName(), AgentAddress: agent.GetAddress(),
	}, nil
}
