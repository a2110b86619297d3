package fastpath_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
)

// TestRecordHoldsUnsettledAttempts: the first attempt has no outcome, and its agent cannot be reached to delete it.
func TestRecordHoldsUnsettledAttempts(t *testing.T) {
	var creates atomic.Int64
	script := func(a *fakeagent.Agent) {
		a.OnCreate = func(context.Context, *agentv1.SandboxRecord) error {
			if creates.Add(1) == 1 {
				return fault.New(errdefs.ErrInternal, fault.Internal, "the answer is lost")
			}
			return nil
		}
		a.OnDelete = func(context.Context, *agentv1.Fence) error {
			return fault.New(errdefs.ErrUnavailable, fault.AgentUnavailable, "cut off")
		}
	}
	m := newMesh(t)
	agents := map[string]*fakeagent.Agent{"a": m.agent("a", 5, script), "b": m.agent("b", 5, script)}
	resp, err := m.create(request("one"))
	require.NoError(t, err)
	m.eventually("it is written", func() bool { return m.resource("one") != nil })
	assignment, err := m.resource("one").Assignment()
	require.NoError(t, err)
	require.EqualValues(t, 2, assignment.Attempt)
	other := map[string]string{"a": "b", "b": "a"}[assignment.AgentUID]
	require.Equal(t, []v1alpha1.Superseded{{AgentPod: "pod-" + other, AgentUID: other, AgentAddress: other, SandboxUID: resp.GetSandbox().GetUid(), Attempt: 1}}, assignment.Superseded)

	kept := agents[assignment.AgentUID].Sandboxes()[0].GetRecord().GetSuperseded()
	require.Len(t, kept, 1)
	require.Equal(t, other, kept[0].GetFence().GetAgentUid())
}

// TestSupersededAttemptIsNotAdopted: a former leader was answered by b, deleted that sandbox, and ended before a's container was.
func TestSupersededAttemptIsNotAdopted(t *testing.T) {
	m := newMesh(t) // the deletion of the later one settles for long
	a, b := m.agent("a", 5, nil), m.agent("b", 5, nil)
	b.AddTombstone(&agentv1.Tombstone{
		Fence: &agentv1.Fence{SandboxUid: "later", Attempt: 1, AgentUid: "b"}, Namespace: ns, Name: "one",
		Superseded: []*agentv1.SupersededAttempt{{Fence: &agentv1.Fence{SandboxUid: "earlier", Attempt: 1, AgentUid: "a"}, AgentPod: "pod-a"}},
	})
	a.Put(unwritten("a", "earlier", "one", "", 1))
	m.eventually("the container of the attempt is deleted", func() bool { return len(a.Sandboxes()) == 0 })
	require.Len(t, b.Tombstones(), 1)
	require.Zero(t, m.api.creates.Load(), "it was never adopted")
}

// TestTombstoneHoldsSupersededAttempts: a sandbox that was never written is deleted, and what its record superseded is deleted
// before the agent may drop the tombstone.
func TestTombstoneHoldsSupersededAttempts(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, nil)
	later := unwritten("a", "later", "one", "", 1)
	later.Record.Superseded = []*agentv1.SupersededAttempt{{Fence: &agentv1.Fence{SandboxUid: "earlier", Attempt: 1, AgentUid: "gone"}, AgentPod: "pod-gone"}}
	m.api.down.Store(true)
	a.Put(later)
	m.eventually("it is found", func() bool { sb, err := m.get("one"); return err == nil && sb.GetUid() == "later" })
	require.NoError(t, m.remove("one"))
	m.eventually("the agent keeps a tombstone", func() bool { return len(a.Tombstones()) == 1 })
	require.Equal(t, "earlier", a.Tombstones()[0].GetSuperseded()[0].GetFence().GetSandboxUid())
	m.api.down.Store(false)
	m.eventually("the agent of the attempt is gone, and the tombstone is dropped", func() bool { return len(a.Tombstones()) == 0 })
}

// TestTombstoneDeletesNoOtherSandbox: a hostile agent keeps a tombstone of its own that says to have superseded containers of others.
func TestTombstoneDeletesNoOtherSandbox(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, nil)
	var lies []*agentv1.SupersededAttempt
	for _, name := range []string{"one", "two"} {
		resp, err := m.create(request(name))
		require.NoError(t, err)
		m.eventually("it is marked", func() bool { return persisted(a, resp.GetSandbox().GetUid()) })
		lies = append(lies, &agentv1.SupersededAttempt{Fence: &agentv1.Fence{SandboxUid: resp.GetSandbox().GetUid(), Attempt: 1, AgentUid: "a"}, AgentPod: "pod-a"})
	}
	b := m.agent("b", 5, nil)
	// It has the name of one of them.
	b.AddTombstone(&agentv1.Tombstone{Fence: &agentv1.Fence{SandboxUid: "lie", Attempt: 1, AgentUid: "b"}, Namespace: ns, Name: "two", Superseded: lies})
	m.eventually("the tombstone is dropped", func() bool { return len(b.Tombstones()) == 0 })
	require.Len(t, a.Sandboxes(), 2)
	require.NotNil(t, m.resource("one"))
	require.NotNil(t, m.resource("two"))
}

// persisted reports whether an agent has marked a sandbox.
func persisted(a *fakeagent.Agent, uid string) bool {
	for _, r := range a.Sandboxes() {
		if r.GetRecord().GetFence().GetSandboxUid() == uid {
			return r.GetPersisted()
		}
	}
	return false
}

// TestAnsweredRequestIsNotAdopted: this replica has seen that the request was answered with a sandbox which is deleted.
func TestAnsweredRequestIsNotAdopted(t *testing.T) {
	m := newMesh(t)
	a := m.agent("a", 5, nil)
	answered := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "one", UID: "later", ResourceVersion: "1",
		Annotations: map[string]string{v1alpha1.AnnotationRequestID: "r1"}}}
	m.server.ResourceSeen(answered)
	m.server.ResourceGone(answered)
	a.Put(unwritten("a", "earlier", "one", "r1", 1))
	m.eventually("its container is deleted", func() bool { return len(a.Sandboxes()) == 0 })
	require.Zero(t, m.api.creates.Load(), "it was never adopted")
}
