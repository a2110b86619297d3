package fakeagent

import (
	"context"
	"strconv"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// guard refuses callers of a lower term than the highest of their kind.
func (s *service) guard(ctx context.Context, method string) error {
	if method == agentv1.AgentService_WatchStatus_FullMethodName || method == agentv1.AgentService_StreamLogs_FullMethodName {
		return nil
	}
	term, err := rpc.TermOf(ctx)
	if err != nil {
		return err
	}
	role := rpc.PeerRole(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	if known := s.terms[role]; term < known {
		s.superseded++
		return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term %d was superseded by term %d", term, known).
			With(rpc.TermMetadata, strconv.FormatInt(known, 10))
	}
	s.terms[role] = term
	return nil
}

// AnnounceLeader implements agentv1.AgentServiceServer.
func (s *service) AnnounceLeader(context.Context, *agentv1.AnnounceLeaderRequest) (*agentv1.AnnounceLeaderResponse, error) {
	return &agentv1.AnnounceLeaderResponse{}, nil
}

// SetTerm makes the agent know a term, as if a leader of that term had called.
func (a *Agent) SetTerm(role rpc.Role, term int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.terms[role] = max(a.terms[role], term)
}

// Term returns the highest term of a kind of caller.
func (a *Agent) Term(role rpc.Role) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.terms[role]
}

// Superseded returns the number of calls that were refused for a lower term.
func (a *Agent) Superseded() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.superseded
}
