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
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
)

// cutOff is a mesh whose allocator was killed in the middle of a strong create, and the create's request. The next
// allocator's informer shows nothing yet if blind.
func cutOff(t *testing.T, blind bool) (*mesh, *sandboxv1.CreateSandboxRequest) {
	t.Helper()
	req := request("one")
	req.Spec.ConsistencyMode = sandboxv1.ConsistencyMode_CONSISTENCY_MODE_STRONG
	req.RequestId = "again"
	m := newMesh(t)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = m.create(req)
	}()
	m.eventually("the custom resource comes first", func() bool { return m.resource("one") != nil })
	m.api.down.Store(true) // nothing can be rolled back now
	m.stop()
	<-ended
	m.api.down.Store(false)
	m.blind.Store(blind)
	m.start()
	return m, req
}

// starts lets the custom resource say that the process runs, as the controller would.
func (m *mesh) starts(name string, change func(*v1alpha1.SandboxStatus)) {
	cr := m.resource(name)
	require.NotNil(m.t, cr)
	change(&cr.Status)
	require.NoError(m.t, m.api.Status().Update(context.Background(), cr))
}

func run(s *v1alpha1.SandboxStatus) { s.Phase = v1alpha1.PhaseRunning }

func TestNextLeaderResumesStrongCreate(t *testing.T) {
	m, req := cutOff(t, false)
	uid := m.resource("one").UID
	type result struct {
		resp *sandboxv1.CreateSandboxResponse
		err  error
	}
	done := make(chan result, 1)
	go func() {
		resp, err := m.create(req)
		done <- result{resp, err}
	}()
	m.starts("one", run)
	r := <-done
	require.NoError(t, r.err)
	require.True(t, r.resp.GetReplayed())
	require.Equal(t, string(uid), r.resp.GetSandbox().GetUid())
	require.Equal(t, uid, m.resource("one").UID)
}

func TestNextLeaderResumesUnseenStrongCreate(t *testing.T) {
	m, req := cutOff(t, true)
	uid := m.resource("one").UID
	m.starts("one", run)
	resp, err := m.create(req)
	require.NoError(t, err)
	require.Equal(t, string(uid), resp.GetSandbox().GetUid())
	require.NotEmpty(t, m.resource("one").Annotations[v1alpha1.AnnotationResumed], "the leader that began it may be stalled, and must not roll it back")
	_, err = m.create(request("one"))
	require.Equal(t, fault.SandboxExists, fault.ReasonOf(err), "another request")
}

// The same for what the informer shows. Once it is marked, the API server is not needed for an answer.
func TestStartedStrongCreateIsMarkedBeforeAnswer(t *testing.T) {
	m, req := cutOff(t, false)
	m.starts("one", run)
	m.eventually("that is seen", func() bool {
		sb, err := m.get("one")
		return err == nil && sb.GetStatus().GetPhase() == sandboxv1.Phase_PHASE_RUNNING
	})
	m.api.down.Store(true)
	_, err := m.create(req)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(err), "it cannot be marked")
	m.api.down.Store(false)
	require.Empty(t, m.resource("one").Annotations[v1alpha1.AnnotationResumed])
	first, err := m.create(req)
	require.NoError(t, err)
	require.NotEmpty(t, m.resource("one").Annotations[v1alpha1.AnnotationResumed])
	m.stop()
	m.start()
	m.api.down.Store(true)
	again, err := m.create(req)
	require.NoError(t, err)
	require.Equal(t, first.GetSandbox().GetUid(), again.GetSandbox().GetUid())
	m.api.down.Store(false)
}

func TestNextLeaderDeletesUnseenSandbox(t *testing.T) {
	m, _ := cutOff(t, true)
	require.NoError(t, m.remove("one"))
	require.NotNil(t, m.resource("one").DeletionTimestamp, "the controller does the rest")
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(m.remove("two")))
	m.api.down.Store(true)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(m.remove("two")), "it is not known")
	m.api.down.Store(false)
}

// A container that an earlier attempt started without an answer, and that is being deleted, answers no repetition.
func TestUnsettledContainerAnswersNoRepetition(t *testing.T) {
	var broken, refusing atomic.Bool
	broken.Store(true)
	refusing.Store(true)
	m := newMesh(t)
	a := m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnStarted = func(context.Context, *agentv1.SandboxRecord) error {
			if broken.CompareAndSwap(true, false) {
				return status.Error(codes.Unknown, "the connection broke")
			}
			return nil
		}
		a.OnDelete = func(context.Context, *agentv1.Fence) error {
			if refusing.Load() {
				return status.Error(codes.Unavailable, "not now")
			}
			return nil
		}
	})
	req := request("one")
	req.RequestId = "again"
	_, err := m.create(req)
	require.Error(t, err)
	m.eventually("the agent reports it", func() bool { sb, err := m.get("one"); return err == nil && sb.GetUid() != "" })
	first := a.Sandboxes()[0].GetRecord().GetFence().GetSandboxUid()
	_, err = m.create(req)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(err), "it may yet be deleted")
	refusing.Store(false)
	m.eventually("another replaces it", func() bool {
		resp, err := m.create(req)
		return err == nil && resp.GetSandbox().GetUid() != first
	})
	require.Len(t, a.Sandboxes(), 1)
}

// Whether a sandbox exists is for its agent to say as well, and that has not spoken to this leader yet.
func TestUnreportedAgentMayHaveSandbox(t *testing.T) {
	var announced atomic.Bool
	m := newMesh(t, func(c *fastpath.Config) { c.Announced = func(string) bool { return announced.Load() } })
	m.agent("a", 5, nil)
	require.Equal(t, fault.AgentUnavailable, fault.ReasonOf(m.remove("one")))
	announced.Store(true)
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(m.remove("one")))
}
