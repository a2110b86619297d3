package fakeagent

import (
	"context"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/identity"
)

// service is the AgentService of an Agent: it keeps the contract.
type service struct {
	agentv1.UnimplementedAgentServiceServer
	*Agent
}

// checkAgent refuses a call that is for another agent.
func (s *service) checkAgent(uid string) error {
	if uid != s.info.GetPodUid() {
		return fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "the call is for agent %s, this is agent %s", uid, s.info.GetPodUid())
	}
	return nil
}

// checkOwn refuses another namespace or pool, as far as the test has said which are the agent's.
func (s *service) checkOwn(namespace, pool string) error {
	for _, x := range []struct{ kind, own, got string }{{"namespace", s.info.GetNamespace(), namespace}, {"pool", s.info.GetPool(), pool}} {
		if x.own != "" && x.got != x.own {
			return fault.New(errdefs.ErrPermissionDenied, fault.PermissionDenied, "the agent runs sandboxes of %s %q, not of %q", x.kind, x.own, x.got)
		}
	}
	return nil
}

// MarkPersisted implements agentv1.AgentServiceServer.
func (s *service) MarkPersisted(ctx context.Context, req *agentv1.MarkPersistedRequest) (*agentv1.MarkPersistedResponse, error) {
	if err := s.checkAgent(req.GetFence().GetAgentUid()); err != nil {
		return nil, err
	}
	if s.OnMark != nil {
		if err := s.OnMark(ctx, req.GetFence()); err != nil {
			return nil, err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.sandboxes[identity.FenceOf(req.GetFence())]
	if !ok {
		return nil, errNotFound(req.GetFence())
	}
	r = proto.CloneOf(r)
	r.Persisted = true
	s.setReport(r)
	return &agentv1.MarkPersistedResponse{}, nil
}

func errNotFound(f *agentv1.Fence) error {
	return fault.New(errdefs.ErrNotFound, fault.SandboxNotFound, "attempt %d of sandbox %s does not exist", f.GetAttempt(), f.GetSandboxUid())
}

// Drain implements agentv1.AgentServiceServer.
func (s *service) Drain(_ context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	if err := s.checkAgent(req.GetAgentUid()); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.accepting = req.GetResume()
	d := &agentv1.AgentDelta{Accepting: proto.Bool(s.accepting)}
	if !s.accepting {
		d.NotAcceptingReason = "Draining"
	}
	s.publish(d)
	return &agentv1.DrainResponse{Sandboxes: int32(len(s.sandboxes))}, nil
}
