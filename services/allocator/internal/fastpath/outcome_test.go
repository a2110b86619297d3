package fastpath_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

// The container of a create that was answered with an error is still being deleted when its caller makes sure that there is
// nothing: should this process die now, the next one would find it, and take it for acknowledged.
func TestDeleteWaitsForUnsettledAttempts(t *testing.T) {
	m := newMesh(t)
	var reachable atomic.Bool
	m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
			return status.Error(codes.Unavailable, "connection reset")
		}
		a.OnDelete = func(context.Context, *agentv1.Fence) error {
			if !reachable.Load() {
				return status.Error(codes.Unavailable, "cut off")
			}
			return nil
		}
	})
	_, err := m.create(request("one"))
	require.True(t, fault.IsUnsettled(err))
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(m.remove("one")))
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(m.remove("another")))
	reachable.Store(true)
	m.eventually("there is nothing", func() bool { return fault.ReasonOf(m.remove("one")) == fault.SandboxNotFound })
}

// A sandbox that expires before it starts was never acknowledged, and the leader that began its create rolls it back: a later leader must
// not answer with it.
func TestExpiredStrongCreateFails(t *testing.T) {
	m, req := cutOff(t, false)
	m.starts("one", func(s *v1alpha1.SandboxStatus) { s.Phase = v1alpha1.PhaseExpired })
	m.eventually("that is seen", func() bool {
		sb, err := m.get("one")
		return err == nil && sb.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_EXPIRED
	})
	_, err := m.create(req)
	require.Equal(t, fault.PhaseConflict, fault.ReasonOf(err))
	require.False(t, fault.IsUnsettled(err))
	m.nothing()
}
