package fastpath_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

// After an error that does not state an unknown outcome nothing of the create remains, even if this process ends.
func TestErrorReportsUnknownOutcome(t *testing.T) {
	cut := func(context.Context, *agentv1.SandboxRecord) error {
		return status.Error(codes.Unavailable, "connection reset")
	}
	tests := map[string]struct {
		script func(*fakeagent.Agent)
		reason fault.Reason
		// unsettled is what the error says.
		unsettled bool
	}{
		"the agent's own word": {func(a *fakeagent.Agent) {
			a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
				return fault.New(errdefs.ErrResourceExhausted, fault.NoCapacity, "full")
			}
		}, fault.NoCapacity, false},
		"the connection broke and the container may run": {func(a *fakeagent.Agent) {
			a.OnStarted = cut
			a.OnDelete = func(context.Context, *agentv1.Fence) error { return errors.New("not now") }
		}, fault.AgentUnavailable, true},
		"a later leader cut it off": {func(a *fakeagent.Agent) {
			a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
				return fault.New(context.Canceled, fault.LeaderSuperseded, "its caller leads no more")
			}
			a.OnDelete = func(context.Context, *agentv1.Fence) error { return errors.New("not now") }
		}, fault.NotLeader, true},
		"a later leader is known": {func(a *fakeagent.Agent) {
			a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
				return fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 7 is known")
			}
			a.OnDelete = func(context.Context, *agentv1.Fence) error { return errors.New("not now") }
		}, fault.NotLeader, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t)
			m.agent("a", 5, test.script)
			_, err := m.create(request("one"))
			require.Equal(t, test.reason, fault.ReasonOf(err))
			require.Equal(t, test.unsettled, fault.IsUnsettled(err))
			var f *fault.Error
			if test.unsettled && errors.As(err, &f) {
				require.Equal(t, ns+"/one", f.Metadata()["sandbox"], "the server may have chosen the name")
			}
		})
	}
}

func TestStrongCreateErrorReportsRollback(t *testing.T) {
	strong := request("one")
	strong.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	// fail has the create fail while the API server can, or cannot, be reached by calls; what it tells by itself still comes.
	fail := func(m *mesh, away bool) error {
		ended := make(chan error, 1)
		go func() {
			_, err := m.create(strong)
			ended <- err
		}()
		m.eventually("the custom resource comes first", func() bool { return m.resource("one") != nil })
		cr := m.resource("one")
		cr.Status.Phase, cr.Status.Reason = v1alpha1.PhaseFailed, string(fault.ImageNotFound)
		m.api.down.Store(away)
		require.NoError(t, m.api.Status().Update(context.Background(), cr))
		return <-ended
	}
	t.Run("rolled back", func(t *testing.T) {
		m := newMesh(t)
		err := fail(m, false)
		require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
		require.False(t, fault.IsUnsettled(err))
		m.nothing()
	})
	t.Run("the API server is away", func(t *testing.T) {
		m := newMesh(t)
		err := fail(m, true)
		require.Equal(t, fault.ImageNotFound, fault.ReasonOf(err))
		require.True(t, fault.IsUnsettled(err))
		m.api.down.Store(false)
		m.nothing()
	})
}

// The process that marked it died before it deleted it.
func TestNextLeaderDeletesAbandonedResource(t *testing.T) {
	m, _ := cutOff(t, false)
	cr := m.resource("one")
	cr.Annotations[v1alpha1.AnnotationAbandoned] = "true"
	require.NoError(t, m.api.Update(t.Context(), cr))
	m.nothing()
}

// What was acknowledged is answered again, also when a new request like it would be refused by now.
func TestRepeatedCreateIsNotValidatedAgain(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	req := request("one")
	req.RequestId, req.Spec.ExpireTime = "again", timestamppb.New(time.Now().Add(200*time.Millisecond))
	first, err := m.create(req)
	require.NoError(t, err)
	m.eventually("it has expired", func() bool { return time.Now().After(req.Spec.ExpireTime.AsTime()) })
	again, err := m.create(req)
	require.NoError(t, err)
	require.True(t, again.GetReplayed())
	require.Equal(t, first.GetSandbox().GetUid(), again.GetSandbox().GetUid())
	other := request("two")
	other.RequestId, other.Spec.ExpireTime = "other", req.Spec.ExpireTime
	_, err = m.create(other)
	require.Equal(t, fault.InvalidField, fault.ReasonOf(err), "a new one is")
}

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
