package fastpath_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/rpc"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
)

// unwritten is a container that a former leader had started and no allocator has written.
func unwritten(agentUID, uid, name, requestID string, attempt int64) *agentv1.SandboxReport {
	return &agentv1.SandboxReport{State: agentv1.SandboxState_SANDBOX_STATE_RUNNING, ContainerId: uid, Record: &agentv1.SandboxRecord{
		Fence: &agentv1.Fence{SandboxUid: uid, Attempt: attempt, AgentUid: agentUID}, Namespace: ns, Name: name, RequestId: requestID,
		Spec: &sandboxv1.SandboxSpec{Image: "busybox", Pool: pool},
	}}
}

func TestLastAttemptIsAdopted(t *testing.T) {
	m := newMesh(t)
	a, b := m.agent("a", 5, nil), m.agent("b", 5, nil)
	a.Put(unwritten("a", "u", "one", "", 1))
	b.Put(unwritten("b", "u", "one", "", 2))
	m.eventually("it is written", func() bool { return m.resource("one") != nil })
	assignment, err := m.resource("one").Assignment()
	require.NoError(t, err)
	require.EqualValues(t, 2, assignment.Attempt)
	require.Equal(t, "b", assignment.AgentUID)
	m.eventually("the first is a leftover", func() bool { return len(a.Sandboxes()) == 0 })
	require.Len(t, b.Sandboxes(), 1)
}

func TestOneRequestOneSandbox(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	req := request("")
	req.RequestId = "r1"
	resp, err := m.create(req)
	require.NoError(t, err)
	a.Put(unwritten("a", "late", "made-up", "r1", 1)) // it had been on its way under the former leader
	m.eventually("no caller knows of it: it is deleted", func() bool { return len(a.Sandboxes()) == 1 })
	require.Equal(t, resp.GetSandbox().GetUid(), a.Sandboxes()[0].GetRecord().GetFence().GetSandboxUid())
	require.Nil(t, m.resource("made-up"))
}

func TestAgentKnowsLaterLeader(t *testing.T) {
	superseded := fault.New(errdefs.ErrFailedPrecondition, fault.LeaderSuperseded, "term 9 is known").With(rpc.TermMetadata, "9")
	var refuse atomic.Bool
	refuse.Store(true)
	script := func(a *fakeagent.Agent) {
		a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
			if refuse.Load() {
				return superseded
			}
			return nil
		}
		a.OnMark = func(context.Context, *agentv1.Fence) error {
			if refuse.Load() {
				return superseded
			}
			return nil
		}
	}
	m := newMesh(t)
	a := m.agent("a", 5, script)
	_, err := m.create(request("one"))
	require.True(t, errdefs.IsUnavailable(err))
	require.Equal(t, fault.NotLeader, fault.ReasonOf(err), "the call is the later leader's to carry out")
	require.Equal(t, 1, a.Creates(), "no other agent is asked")
	m.eventually("the container is not taken for gone without a word", func() bool { return len(a.Deletes()) == 1 })
	refuse.Store(false)
	_, err = m.create(request("one"))
	require.NoError(t, err)
}

// events writes down reasons.
type events struct{ seen chan string }

func (e *events) Eventf(_, _ runtime.Object, kind, reason, _, _ string, _ ...any) {
	e.seen <- kind + " " + reason
}

func TestEvents(t *testing.T) {
	e := &events{seen: make(chan string, 10)}
	m := newMesh(t, func(c *fastpath.Config) { c.Events = e })
	a := m.agent("a", 5, nil)
	a.Put(unwritten("a", "u", "adopted", "", 1))
	require.Equal(t, corev1.EventTypeNormal+" Adopted", <-e.seen)
	var taken atomic.Bool
	m.api.onCreate.Store(func(sb *v1alpha1.Sandbox) { // another client writes the name a moment earlier
		if taken.CompareAndSwap(false, true) {
			theirs := &v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Image: "theirs", PoolRef: pool}}
			theirs.Namespace, theirs.Name = ns, sb.Name
			if err := m.api.Create(context.Background(), theirs); err != nil {
				t.Error(err)
			}
		}
	})
	_, err := m.create(request("taken"))
	require.NoError(t, err)
	require.Equal(t, corev1.EventTypeWarning+" NameConflict", <-e.seen)
	m.eventually("theirs has won", func() bool { sb, err := m.get("taken"); return err == nil && sb.GetSpec().GetImage() == "theirs" })
}
