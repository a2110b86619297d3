package fastpath_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	agentv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/agent/v1"
	sandboxv1 "github.com/fast-sandbox/fast-sandbox/gen/go/fastsandbox/sandbox/v1"
	"github.com/fast-sandbox/fast-sandbox/internal/apis/v1alpha1"
	"github.com/fast-sandbox/fast-sandbox/internal/fault"
	"github.com/fast-sandbox/fast-sandbox/internal/testkit/fakeagent"
	"github.com/fast-sandbox/fast-sandbox/services/allocator/internal/fastpath"
)

// soon makes what waits for late writes wait less.
func soon(c *fastpath.Config) { c.Settle = 200 * time.Millisecond }

// written creates a sandbox and waits until everybody knows its custom resource.
func (m *mesh) written(a *fakeagent.Agent, name string) string {
	m.t.Helper()
	resp, err := m.create(request(name))
	require.NoError(m.t, err)
	m.eventually("it is written", func() bool {
		sb, err := m.get(name)
		return err == nil && sb.GetStatus().GetPersisted()
	})
	m.eventually("the agent has marked it", func() bool {
		for _, r := range a.Sandboxes() {
			if r.GetRecord().GetName() == name {
				return r.GetPersisted()
			}
		}
		return false
	})
	return resp.GetSandbox().GetUid()
}

func TestDeleteWithoutAPIServer(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, nil)
	uid := m.written(a, "one")
	m.api.down.Store(true)
	require.NoError(t, m.remove("one"))
	require.Len(t, a.Tombstones(), 1, "durable before the answer")
	require.Equal(t, uid, a.Tombstones()[0].GetFence().GetSandboxUid())
	require.Equal(t, "one", a.Tombstones()[0].GetName())
	m.eventually("the container is gone", func() bool { return len(a.Sandboxes()) == 0 })
	sb, err := m.get("one")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Phase_PHASE_TERMINATING, sb.GetStatus().GetPhase())
	require.NoError(t, m.remove("one"), "it may be repeated")
	_, err = m.create(request("one"))
	require.Equal(t, fault.SandboxExists, fault.ReasonOf(err), "the name is taken until its custom resource is gone")
	require.NotNil(t, m.resourceAnyway("one"))
	m.api.down.Store(false)
	m.nothing()
	m.eventually("the agent may forget", func() bool { return len(a.Tombstones()) == 0 })
	_, err = m.create(request("one"))
	require.NoError(t, err)
}

// resourceAnyway looks past a cut connection.
func (m *mesh) resourceAnyway(name string) *v1alpha1.Sandbox {
	list := &v1alpha1.SandboxList{}
	require.NoError(m.t, m.api.List(context.Background(), list))
	for i := range list.Items {
		if list.Items[i].Name == name {
			return &list.Items[i]
		}
	}
	return nil
}

func TestNextLeaderResumesDeletions(t *testing.T) {
	tests := map[string]func(m *mesh, a *fakeagent.Agent){
		"of a written sandbox": func(m *mesh, a *fakeagent.Agent) {
			m.written(a, "one")
			m.api.down.Store(true)
			require.NoError(m.t, m.remove("one"))
			require.NotNil(m.t, m.resourceAnyway("one"))
		},
		"of one whose write is of unknown outcome": func(m *mesh, _ *fakeagent.Agent) {
			m.api.mute.Store(true)
			_, err := m.create(request("one"))
			require.NoError(m.t, err)
			m.eventually("it was sent", func() bool { return m.api.creates.Load() > 0 })
			m.api.down.Store(true)
			require.NoError(m.t, m.remove("one"))
			require.NotNil(m.t, m.resourceAnyway("one"))
		},
		"of one that was never written": func(m *mesh, _ *fakeagent.Agent) {
			m.api.down.Store(true)
			_, err := m.create(request("one"))
			require.NoError(m.t, err)
			require.NoError(m.t, m.remove("one"))
		},
	}
	for name, delete := range tests {
		t.Run(name, func(t *testing.T) {
			m := newMesh(t, soon)
			a := m.agent("a", 5, nil)
			delete(m, a)
			require.True(t, len(a.Tombstones()) == 1 || a.Forgotten() == 1)
			m.stop()
			m.api.mute.Store(false)
			m.api.down.Store(false)
			m.start(soon)
			m.nothing()
			m.eventually("the agent may forget", func() bool { return len(a.Tombstones()) == 0 })
		})
	}
}

func TestWriteLandsAfterDeletion(t *testing.T) {
	m := newMesh(t, func(c *fastpath.Config) { c.Settle = time.Hour })
	a := m.agent("a", 5, nil)
	a.AddTombstone(&agentv1.Tombstone{
		Fence: &agentv1.Fence{SandboxUid: "old", Attempt: 1, AgentUid: "a"}, Namespace: ns, Name: "one", RequestId: "r1", DeleteTime: timestamppb.Now(),
	})
	req := request("one")
	req.RequestId = "r1"
	m.eventually("its create is not repeated", func() bool {
		_, err := m.create(req)
		return fault.ReasonOf(err) == fault.SandboxTerminating
	})
	late := &v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "one", Annotations: map[string]string{v1alpha1.AnnotationSandboxUID: "old"}},
		Spec:       v1alpha1.SandboxSpec{Image: "x", PoolRef: pool},
	}
	var landed atomic.Bool
	m.api.onCreate.Store(func(sb *v1alpha1.Sandbox) { // a moment before the new sandbox of the name is written
		if sb != late && landed.CompareAndSwap(false, true) {
			if err := m.api.Create(context.Background(), late); err != nil {
				t.Error(err)
			}
		}
	})
	resp, err := m.create(request("one"))
	require.NoError(t, err)
	m.eventually("the late one is deleted and the new one written", func() bool {
		sb := m.resource("one")
		return landed.Load() && sb != nil && sb.EffectiveUID() == resp.GetSandbox().GetUid()
	})
	require.Len(t, a.Sandboxes(), 1)
	require.Len(t, a.Tombstones(), 1, "until no write can land any longer")
}

// TestNotFoundNeedsConfirmedLeadership: one that was stopped for a while does not know what a later one has made.
func TestNotFoundNeedsConfirmedLeadership(t *testing.T) {
	leads := &paused{}
	m := newMesh(t, func(c *fastpath.Config) { c.Leadership = leads })
	m.agent("a", 5, nil)
	require.Equal(t, fault.NotLeader, fault.ReasonOf(m.remove("unknown")))
	leads.err.Store(true)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(m.remove("unknown")))
	leads.sure.Store(true)
	require.Equal(t, fault.SandboxNotFound, fault.ReasonOf(m.remove("unknown")))
}

// TestSuspendedLeaderPersistsNothing: its successor may have answered that there is no such sandbox.
func TestSuspendedLeaderPersistsNothing(t *testing.T) {
	leads := &paused{}
	m := newMesh(t, func(c *fastpath.Config) { c.Leadership = leads })
	m.agent("a", 5, nil)
	_, err := m.create(request("one"))
	require.NoError(t, err)
	m.eventually("the write has asked", func() bool { return leads.asked.Load() > 2 })
	require.Nil(t, m.resource("one"))
	leads.sure.Store(true)
	m.eventually("it is written", func() bool { return m.resource("one") != nil })
}

// paused leads as far as it knows; what it learns when it asks is the test's to say.
type paused struct {
	sure, err atomic.Bool
	asked     atomic.Int64
}

func (p *paused) Leads() bool { return true }

func (p *paused) Confirm(context.Context) (bool, error) {
	p.asked.Add(1)
	if p.err.Swap(false) {
		return false, errors.New("connection refused")
	}
	return p.sure.Load(), nil
}

func TestDeleteWithoutContainerNeedsAPIServer(t *testing.T) {
	m := newMesh(t)
	m.agent("a", 5, nil)
	pending := &v1alpha1.Sandbox{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "pending"}, Spec: v1alpha1.SandboxSpec{Image: "x", PoolRef: pool}}
	require.NoError(t, m.api.Create(context.Background(), pending))
	m.eventually("it is seen", func() bool { _, err := m.get("pending"); return err == nil })
	m.api.down.Store(true)
	require.Equal(t, fault.APIUnavailable, fault.ReasonOf(m.remove("pending")))
	sb, err := m.get("pending")
	require.NoError(t, err)
	require.Nil(t, sb.GetDeleteTime())
	m.api.down.Store(false)
	require.NoError(t, m.remove("pending"))
	m.nothing()
}

func TestQueuedDeletionsAreBounded(t *testing.T) {
	m := newMesh(t, soon, func(c *fastpath.Config) { c.WriteLimit = 1 })
	a := m.agent("a", 5, nil)
	m.written(a, "one")
	m.eventually("there is room", func() bool { return m.server.Pending() == 0 })
	m.written(a, "two")
	m.eventually("there is room", func() bool { return m.server.Pending() == 0 })
	m.api.down.Store(true)
	require.NoError(t, m.remove("one"))
	err := m.remove("two")
	require.True(t, errdefs.IsResourceExhausted(err), "%v", err)
	require.Equal(t, fault.Overloaded, fault.ReasonOf(err))
	_, retry := fault.RetryAfter(err)
	require.True(t, retry)
	sb, err := m.get("two")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, sb.GetStatus().GetPhase())
	m.api.down.Store(false)
	m.eventually("there is room again", func() bool { return m.remove("two") == nil })
	m.nothing()
	m.eventually("nothing is pending", func() bool { return m.server.Pending() == 0 })
}

func TestDeleteFailsIfNotDurable(t *testing.T) {
	m := newMesh(t, soon)
	a := m.agent("a", 5, func(a *fakeagent.Agent) {
		a.OnDelete = func(context.Context, *agentv1.Fence) error {
			return fault.New(errdefs.ErrResourceExhausted, fault.Overloaded, "too many tombstones")
		}
	})
	m.api.down.Store(true)
	_, err := m.create(request("one"))
	require.NoError(t, err)
	require.Equal(t, fault.Overloaded, fault.ReasonOf(m.remove("one")))
	asked := len(a.DeleteRequests())
	sb, err := m.get("one")
	require.NoError(t, err)
	require.Equal(t, sandboxv1.Phase_PHASE_RUNNING, sb.GetStatus().GetPhase())
	m.api.down.Store(false)
	m.eventually("its write continues", func() bool { return len(a.Sandboxes()) == 1 && a.Sandboxes()[0].GetPersisted() })
	require.Len(t, a.DeleteRequests(), asked, "a deletion that was refused ends with its call")
	require.Empty(t, a.Tombstones())
}
