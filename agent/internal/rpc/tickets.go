package rpc

import (
	"context"
	"crypto/x509"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"k8s.io/utils/clock"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/auth"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// Users lets the users call that an allocator has given a ticket: for the output of one sandbox, by `fsb-ctl logs --direct`.
func Users(own *rpc.Identity, agentUID string, c clock.PassiveClock) *rpc.Users {
	t := &tickets{own: own, clock: c}
	return &rpc.Users{Tokens: t, Access: t, Rules: map[string]rpc.Rule{
		agentv1.AgentService_StreamLogs_FullMethodName: {Self: true, Check: func(c auth.Caller, m proto.Message) error {
			return permits(c.Ticket, agentUID, agentv1.AgentService_StreamLogs_FullMethodName, m.(*agentv1.StreamLogsRequest).GetFence())
		}},
	}}
}

// tickets authenticates callers by tickets.
type tickets struct {
	own   *rpc.Identity
	clock clock.PassiveClock
}

// Authenticate returns the caller whom a ticket was issued to.
func (t *tickets) Authenticate(_ context.Context, text string) (auth.Caller, error) {
	_, roots, err := t.own.Current()
	if err != nil {
		return auth.Caller{}, err
	}
	ticket, err := auth.ReadTicket(text, roots, func(c *x509.Certificate) bool { return rpc.HasRole(c, rpc.RoleAllocator) }, t.clock.Now())
	if err != nil {
		return auth.Caller{}, err
	}
	return auth.Caller{User: ticket.User, Method: auth.ByTicket, Ticket: &ticket}, nil
}

// Decide allows nothing: a ticket is for one method, which has a check of its own.
func (t *tickets) Decide(context.Context, auth.Caller, auth.Access) (auth.Decision, error) {
	return auth.Decision{}, nil
}

// permits returns PERMISSION_DENIED unless a ticket is for the method, the container and this agent.
func permits(t *auth.Ticket, agentUID, method string, f *agentv1.Fence) error {
	if t != nil && t.Method == method && t.AgentUID == agentUID && f.GetAgentUid() == agentUID && t.SandboxUID == f.GetSandboxUid() && t.Attempt == f.GetAttempt() {
		return nil
	}
	return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "the ticket is for another method or sandbox")
}
