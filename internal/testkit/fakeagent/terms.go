package fakeagent

import (
	"context"
	"strconv"

	"github.com/containerd/errdefs"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
)

// guard refuses leaders that were superseded: the highest term of each kind of caller is remembered.
func (a *Agent) guard(ctx context.Context, method string) error {
	if method == agentv1.AgentService_WatchStatus_FullMethodName || method == agentv1.AgentService_StreamLogs_FullMethodName {
		return nil
	}
	term, err := rpc.TermOf(ctx)
	if err != nil {
		return err
	}
	role := rpc.PeerRole(ctx)
	a.mu.Lock()
	defer a.mu.Unlock()
	if known := a.terms[role]; term < known {
		a.superseded++
		return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term %d is known", known).
			With(rpc.TermMetadata, strconv.FormatInt(known, 10))
	}
	a.terms[role] = term
	return nil
}

// AnnounceLeader implements agentv1.AgentServiceServer.
func (a *Agent) AnnounceLeader(context.Context, *agentv1.AnnounceLeaderRequest) (*agentv1.AnnounceLeaderResponse, error) {
	return &agentv1.AnnounceLeaderResponse{}, nil
}

// Drain implements agentv1.AgentServiceServer.
func (a *Agent) Drain(_ context.Context, req *agentv1.DrainRequest) (*agentv1.DrainResponse, error) {
	if req.GetAgentUid() != a.info.GetPodUid() {
		return nil, fault.New(errdefs.ErrFailedPrecondition, fault.FenceMismatch, "this agent is %s", a.info.GetPodUid())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.accepting = req.GetResume()
	d := &agentv1.AgentDelta{Accepting: &a.accepting}
	if !a.accepting {
		d.NotAcceptingReason = "Draining"
	}
	a.tell(d)
	return &agentv1.DrainResponse{Sandboxes: int32(len(a.sandboxes))}, nil
}

// Know makes the agent know a term, as if a leader of that term had called.
func (a *Agent) Know(role rpc.Role, term int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.terms[role] = max(a.terms[role], term)
}

// Term is the highest term known of a kind of caller.
func (a *Agent) Term(role rpc.Role) int64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.terms[role]
}

// Superseded is how many calls of a lower term were refused.
func (a *Agent) Superseded() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.superseded
}
